"""Batches of rows: the same documents as one by one, whatever the texts; odd jsonl and Parquet files; what is sound."""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hone.feed.files.listing import list_source
from hone.readers import json_rows
from hone.readers.documents import Batch, Broken, Document, Fault, Noted, Options, settle
from hone.readers.read import read_batches, read_file
from hone.readers.sound import settle_batch
from hone.text.batch import Texts
from hone.text.normalize import normalize
from hone.text.sound import ODD, look, plain_bytes, tables

STRANGE = "\0\r\n\t \x0b\x1c\x85\xa0éÃ©Â»€™â\u0301\u0300\u093c\u09be\u1161\u11a8가각\u2000\u2028\u3099か\ufffd\ufeff\u2126\u212b\uf900😀𝐀𑂙"
PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["word", "an apple", "\n", " ", "\r\n", "\n\n", " \n", "\u00e9", "e\u0301", "\u2019", "Ã©", "â€™", "Ð¿Ñ€"]
        ),
        st.text(max_size=8),
        st.text(alphabet=STRANGE, max_size=6),
    ),
    max_size=8,
).map("".join)
PLAIN = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


def expected(text: str) -> tuple[str, str]:
    """What one text becomes, by the plain rule."""
    return settle(text)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(PIECES.filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text)), max_size=6))
@example(["e\u0301"])
@example(["\u1100\u1161"])
@example(["", "x", ""])
@example(["x\u2003", "x \n", "\nx", "x\x1c", "\u3000"])
def test_a_batch_is_settled_as_each_text_alone(strings):
    texts, kept, faults = settle_batch(Texts.of(strings))
    each = [expected(text) for text in strings]
    assert list(texts.strings()) == [text for reason, text in each if not reason]
    assert kept.tolist() == [number for number, (reason, _) in enumerate(each) if not reason]
    broken = [fault.reason for fault in faults if isinstance(fault, Fault)]
    assert sorted(broken) == sorted(reason for reason, _ in each if reason)
    repaired = sum("\0" in text and not reason for text, (reason, _) in zip(strings, each))
    assert sum(isinstance(fault, Noted) for fault in faults) == repaired


@settings(max_examples=300)
@given(
    st.lists(
        st.lists(
            st.sampled_from(
                "aeo\u00ea\u1ea1\u0301\u0302\u0323\u0307\u0327\u0345\u05b0\u05bc\u0651\u064e\u0654\u0628\u0627"
            )
            | st.sampled_from(
                "\u09c7\u09be\u0bc6\u0bbe\u0dd9\u0dcf\u0dca\u094d\u093c\u0928\u0e38\u0e48\u0e01\u1100\u1161\u11a8가각か\u3099😀"
            ),
            max_size=7,
        ).map("".join),
        max_size=5,
    )
)
def test_marks_in_any_order_are_settled_as_each_text_alone(strings):
    texts, _, faults = settle_batch(Texts.of(strings))
    each = [settle(text) for text in strings]
    assert list(texts.strings()) == [text for reason, text in each if not reason]
    assert len(faults) == sum(bool(reason) for reason, _ in each)


def test_texts_of_75_languages_stand_as_they_are(shared_data):
    with gzip.open(shared_data / "langid" / "lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as lines:
        sentences = [unicodedata.normalize("NFC", json.loads(line)["text"]).strip() for line in lines]
    states = look(*Texts.of(sentences), plain_bytes(), *tables())
    assert (states == ODD).mean() < 0.01


def test_every_character_after_every_kind_of_character():
    """Whatever NFC changes is noticed: each character of Unicode alone, after a letter and after a Korean or Bengali one."""
    odd = []
    for code in (*range(1, 0xD800), *range(0xE000, 0x30000)):
        for before in ("", "e", "각", "가", "\u09c7", "か"):
            text = f"a{before}{chr(code)}b"
            if unicodedata.normalize("NFC", text) != text:
                odd.append(text)
    texts, kept, faults = settle_batch(Texts.of(odd))
    assert len(odd) > 2000 and not faults and len(kept) == len(odd)
    assert list(texts.strings()) == [unicodedata.normalize("NFC", text) for text in odd]


@settings(max_examples=200)
@given(
    st.lists(
        st.binary(max_size=12) | st.text(max_size=6).map(lambda text: text.encode("utf8", "surrogatepass")), max_size=5
    )
)
@example([b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xff", b"a"])
def test_bytes_that_are_no_utf8_are_found(strings):
    import numpy as np

    offsets = np.cumsum([0, *map(len, strings)]).astype(np.int64)
    texts, kept, faults = settle_batch(Texts(np.frombuffer(b"".join(strings), np.uint8), offsets))
    wrong = set()
    for number, raw in enumerate(strings):
        try:
            raw.decode()
        except UnicodeDecodeError:
            wrong.add(number)
    assert not wrong & set(kept.tolist())
    assert sum(isinstance(fault, Fault) and fault.reason == "wrong_encoding" for fault in faults) >= len(wrong)
    list(texts.strings())


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text",
    [
        "Ein schöner Tag für Grüße und Küsse, sagte das Mädchen.",
        "“Don’t — he said — it’s naïve” and “that’s all”",
        "где же кружка и что в ней было",
        "今日は天気がいいから散歩しましょう",
    ],
)
def test_mojibake_is_known_and_real_text_is_none(text, encoding):
    assert settle(text) == ("", text)
    table = {byte: ord(bytes([byte]).decode(encoding, "ignore") or chr(byte)) for byte in range(256)}
    broken = "".join(chr(table[byte]) for byte in text.encode())
    assert settle(broken) == ("", text)
    twice = "".join(chr(table[byte]) for byte in broken.encode())
    texts, _, faults = settle_batch(Texts.of([text, broken, twice]))
    assert list(texts.strings()) == [text] * 3 and not faults


@pytest.mark.timeout(60)
def test_mojibake_is_repaired_at_any_place_of_a_long_text():
    text = "a" * (1 << 18) + " Ã©" * 5 + "é and so on " * 9999 + "cafÃ© "
    assert settle(text) == ("", text.replace("Ã©", "é").rstrip())


def test_mojibake_that_cannot_be_repaired_is_measured_by_the_length_of_the_text():
    broken, lossy = "â€™", "gr‰ce, deuxi\x8fme, lâƒglise"
    book = "A book of many plain words. " * 12_000
    said = f"It{broken}s what he{broken}d say: don{broken}t, â€œneverâ€, he said."
    assert settle(f"{said} {book}.") == ("", f"It’s what he’d say: don’t, “never”, he said. {book}.")
    reason, text = settle(f"{lossy} {book}.")
    assert not reason and text.startswith("gr‰ce") and text.endswith(f"{book}.")
    assert settle(f"words {lossy} words") == ("mojibake", f"words {lossy} words")
    _, kept, faults = settle_batch(Texts.of([f"{lossy} {book}.", f"words {lossy} words"]))
    assert kept.tolist() == [0] and [fault.reason for fault in faults] == ["mojibake"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Kehittelemme nyt hevosten MÃ¤rz", "Kehittelemme nyt hevosten März"),
        ("la coerciÃ³ de tots", "la coerció de tots"),
        ("l\x92Ecole \x93Nummisuutarit\x94, 16\x9617.", "l’Ecole “Nummisuutarit”, 16–17."),
        ("voilà\u00a0» dit-il, É” et GRÖßE", "voilà\u00a0» dit-il, É” et GRÖßE"),
        ("SÃ£o Paulo, 東京 and Łódź", "São Paulo, 東京 and Łódź"),
    ],
)
def test_a_single_character_of_mojibake_is_repaired_and_real_text_stays(text, meant):
    assert settle(text) == ("", meant)
    texts, _, faults = settle_batch(Texts.of([text, "plain"]))
    assert list(texts.strings()) == [meant, "plain"] and not faults


def test_real_text_with_a_few_broken_quotes_is_kept(shared_data):
    path = shared_data / "lm_text" / "tinystories-200K.txt"
    (document,) = items(path)
    assert len(document.text) > 195_000 and document.text.count("”") == 62 and "â€" not in document.text


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["\u0301\u0316", "\u0f73", "\U0001d165\u0301"])
def test_piled_marks_are_set_aside_before_they_are_put_in_order(mark):
    """Sorted, the last of them would take days."""
    reasons = []
    for count in (1, 100, 301, 10**6):
        for before in ("", "some words é ", "語" * 299, "x" * 10_000):
            text = f"{before}e{count * mark}, and more words"
            reason, _ = settle(text)
            piled = count * len(mark) > 300
            assert reason == ("piled_marks" if piled else ""), (count, before[:20])
            _, kept, faults = settle_batch(Texts.of([text, "fine"]))
            assert len(kept) == 2 - piled and [fault.reason for fault in faults] == ["piled_marks"] * piled
            reasons.append(reason)
    assert len(set(reasons)) == 2


def test_marks_in_order_may_be_many():
    for text in ("a" + "\u0316" * 5000 + "\u0301" * 5000, "हिन्दी में लिखा हुआ पाठ " * 500, "שָׁלוֹם עֲלֵיכֶם " * 500):
        assert settle(text)[0] == "" and len(settle_batch(Texts.of([text]))[1]) == 1


def test_the_mojibake_among_real_sentences_is_found_and_nothing_else(shared_data):
    with gzip.open(shared_data / "langid" / "lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as lines:
        sentences = [json.loads(line)["text"] for line in lines]
    assert len(sentences) > 74_000
    found = [(text, settle(text)) for text in sentences]
    changed = [text for text, (reason, kept) in found if reason or kept != normalize(text)]
    assert 240 < len(changed) < 260 and all(
        re.search("[ÃÂâïÄÅĹÐÑ][^a-z ]|[\x80-\x9f]|\ufffd", text) for text in changed
    )
    missed = [text for text in sentences if len(re.findall("Ã[¤¶¼©]|â€[™œ]|ï¿½", text)) > 2 and text not in changed]
    assert not missed
    aside = [text for text, (reason, _) in found if reason]
    assert len(aside) < 25 and sum("ï¿½" not in text for text in aside) <= 3  # which stands for letters that are lost


def items(path: Path, **options) -> list[Document | Broken]:
    """What is in the files at `path`, after checking that batches hold the same."""
    alone = [item for file in list_source(str(path)).files for item in read_file(file, Options(**options))]
    assert all(item.repaired for item in alone if isinstance(item, Noted))
    alone = [item for item in alone if not isinstance(item, Noted)]
    batched: list[Document | Broken] = []
    for file in list_source(str(path)).files:
        for item in read_batches(file, Options(**options)):
            batched += item.documents() if isinstance(item, Batch) else [item] if isinstance(item, Broken) else []
    key = lambda item: (isinstance(item, Broken), *map(str, item))  # noqa: E731
    assert sorted(batched, key=key) == sorted(alone, key=key)
    return alone


def texts(path: Path, **options) -> list[str]:
    return [item.text for item in items(path, **options) if isinstance(item, Document)]


def reasons(path: Path, **options) -> list[str]:
    return [item.reason for item in items(path, **options) if isinstance(item, Broken)]


@settings(max_examples=60)
@given(st.lists(PIECES, max_size=12), st.booleans(), st.sampled_from([7, 64, 1 << 20]))
def test_jsonl_round_trip(tmp_path_factory, strings, ascii_only, block):
    path = tmp_path_factory.mktemp("round") / "a.jsonl"
    lines = [
        json.dumps({"n": n, "text": text, "url": f"u{n}"}, ensure_ascii=ascii_only) for n, text in enumerate(strings)
    ]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf8", "surrogatepass"))
    before, json_rows.BLOCK_BYTES = json_rows.BLOCK_BYTES, block
    try:
        found = items(path)
    finally:
        json_rows.BLOCK_BYTES = before
    good = [(expected(text)[1], f"u{n}") for n, text in enumerate(strings) if not expected(text)[0]]
    documents = [item for item in found if isinstance(item, Document)]
    assert [(item.text, item.url) for item in documents] == good
    assert len({item.id for item in documents}) == len(documents)
    assert len(found) == max(len(strings), 1)


@settings(max_examples=60)
@given(
    st.lists(PLAIN | st.none(), max_size=12),
    st.sampled_from(["string", "large_string", "dictionary", "binary", "string_view"]),
)
def test_parquet_round_trip(tmp_path_factory, strings, kind):
    path = tmp_path_factory.mktemp("round") / "a.parquet"
    kinds = {"dictionary": pa.dictionary(pa.int32(), pa.string()), "string_view": pa.string_view()}
    column = pa.array(strings, pa.string()).cast(kinds.get(kind) or getattr(pa, kind)())
    parquet.write_table(pa.table({"n": list(range(len(strings))), "text": column}), path, row_group_size=3)
    good = [expected(text)[1] for text in strings if text is not None and not expected(text)[0]]
    assert texts(path) == good
    assert len(items(path)) == max(len(strings), 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_address_and_other_fields_come_along(tmp_path, name):
    table = [
        {
            "text": "one",
            "url": "http://a/",
            "license": "MIT",
            "meta": {"stars": 3, "tags": ["x", "y"]},
            "body": {"main": {"text": "I"}},
        },
        {"text": "two", "url": None, "license": None, "meta": None, "body": {"main": {"text": "II"}}},
        {
            "text": "three",
            "url": "http://c/",
            "license": "",
            "meta": {"stars": 0, "tags": []},
            "body": {"main": {"text": "III"}},
        },
    ]
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, table)))
    else:
        parquet.write_table(pa.Table.from_pylist(table), path)
    plain = items(path)
    assert [item.url for item in plain] == ["http://a/", "", "http://c/"] and {item.metadata for item in plain} == {""}
    asked = items(path, metadata_fields=("license", "meta", "absent"))
    first = json.loads(asked[0].metadata)
    assert first == {"license": "MIT", "meta": {"stars": 3, "tags": ["x", "y"]}} and asked[1].metadata == ""
    assert [item.url for item in asked] == [item.url for item in plain]
    assert [item.id for item in asked] == [item.id for item in plain]
    assert texts(path, text_field="body.main.text") == ["I", "II", "III"]
    assert [item.url for item in items(path, url_field="license")] == ["MIT", "", ""]
    assert set(reasons(path, text_field="body.main.absent")) == {"no_text_field"}
    assert set(reasons(path, text_field="meta")) == {"no_text_field"}


def test_a_row_of_100_megabytes_is_set_aside_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "after"}\n')
    assert texts(path) == ["before", "after"]
    (broken,) = [item for item in items(path) if isinstance(item, Broken)]
    assert broken.reason == "row_too_long" and broken.num_bytes > 100 << 20
    with open(path, "ab") as file:
        for _ in range(70):
            file.write(b"y" * (1 << 20))
    assert reasons(path) == ["row_too_long", "row_too_long"]  # without an end


def test_a_row_of_30_megabytes_is_a_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "word " * (6 << 20)}) + "\n" + json.dumps({"text": "small"}))
    assert [len(text) for text in texts(path)] == [5 * (6 << 20) - 1, 5]


def test_odd_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "marked"}\n')
    assert texts(path) == ["marked"]
    path.write_bytes('{"text": "x"}\n'.encode("utf-16"))
    assert reasons(path) == ["wrong_encoding"]
    path.write_bytes(b'{"text": "a"} {"text": "b"}\n{"text": "d"}')
    assert texts(path) == ["d"] and reasons(path) == ["bad_json"]
    path.write_bytes(b'{"text":\n"c"}\n{"text": "d"}')
    assert texts(path) == ["d"] and reasons(path) == ["bad_json"] * 2
    path.write_bytes(b'{"text": "a\\u0000b"}\n{"text": "a\\u0000b\\u0000"}\n{"text": "ok"}\n\n  \n')
    assert texts(path) == ["ab", "ok"] and reasons(path) == ["binary"]
    path.write_bytes(b"[" * 5_000_000 + b'\n{"text": "ok"}')
    assert texts(path) == ["ok"] and reasons(path) == ["bad_json"]
    path.write_bytes(b'{"text": "x", "n": ' + b"[" * 200_000 + b"]" * 200_000 + b'}\n{"text": "ok"}')
    assert texts(path)[-1:] == ["ok"]
    path.write_bytes(b'{"text": 7, "url": 8}\n{"text": "ok", "url": 8}\n{"text": "yes", "url": "u"}')
    assert texts(path) == ["ok", "yes"] and reasons(path) == ["no_text_field"]


def test_a_bomb_is_noticed(tmp_path, monkeypatch):
    from hone.feed.files import streams

    monkeypatch.setattr(streams, "FREE_BYTES", 1 << 20)
    import zstandard

    row = b'{"text": "' + b"0" * 1000 + b'"}\n'
    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        path = tmp_path / name
        path.write_bytes(compress(row * 40_000))
        assert reasons(path)[-1] == "expands_too_much"
        path.unlink()


def test_a_parquet_file_that_lies_about_its_size(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": ["same old text" * 100] * 9000}), path, use_dictionary=False, compression="zstd"
    )
    monkeypatch.setattr("hone.readers.tables._FREE_TABLE_BYTES", 1 << 20)
    assert reasons(path) == ["expands_too_much"]


def test_a_parquet_file_with_any_byte_changed(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"text number {n}" for n in range(300)]}), path, compression="zstd")
    whole = path.read_bytes()
    for place in range(4, len(whole), max(len(whole) // 150, 1)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        for file in list_source(str(path)).files:
            for item in read_file(file, Options()):
                assert isinstance(item, Document | Broken | Noted)


def test_bytes_in_parquet_that_are_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([b"good", b"\xff\xfe bad", "schön".encode()], pa.binary())}), path)
    assert texts(path) == ["good", "schön"] and reasons(path) == ["wrong_encoding"]
