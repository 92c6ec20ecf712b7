"""JSON in every shape, compressed rows, CSV, Arrow and chats, written by other libraries or by hand."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pytest
import zstandard
from pyarrow import feather, parquet

from hone.feed.chat import rendered
from tests.readers.formats.written import items, noted, put, reasons, texts

ROWS = [{"text": f'row {n}: "quoted" {{[,]}} \\ and\nline é😀', "n": n} for n in range(5)]
WANTED = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
}


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a", "part-00000"])
def test_every_compression(tmp_path, name, ending):
    content = b"words in two\nlines" if name == "a.txt" else LINES.encode()
    path = put(tmp_path / f"{name}{ending}", COMPRESS[ending](content[:20]) + COMPRESS[ending](content[20:]))
    assert texts(path) == ([content.decode()] if name == "a.txt" else WANTED)
    path.write_bytes(COMPRESS[ending](content * 50)[:-9])
    assert "truncated" in reasons(path)
    path.write_bytes(b"no such thing at all")
    assert reasons(path) == ["bad_compression"]
    path.write_bytes(COMPRESS[ending](content * 50)[:30] + b"\xff" * 40)
    assert reasons(path) and set(reasons(path)) <= {"bad_compression", "truncated", "bad_json", "empty"}


@pytest.mark.parametrize("ending", [".bz2", ".xz"])
def test_a_bomb_ends(tmp_path, ending, monkeypatch):
    from hone.feed.files import streams

    monkeypatch.setattr(streams, "FREE_BYTES", 1 << 20)
    path = put(tmp_path / f"a.txt{ending}", COMPRESS[ending](b"0" * (8 << 20)))
    assert reasons(path) == ["expands_too_much"]


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.replace("\n", "\r\n"),
        "\ufeff" + LINES,
        json.dumps(ROWS),
        "\ufeff" + json.dumps(ROWS, indent=2),
        json.dumps(ROWS, indent=2, ensure_ascii=False),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        "".join(json.dumps(row) for row in ROWS),
        json.dumps(ROWS[:2]) + json.dumps(ROWS[2:]),
    ],
)
@pytest.mark.parametrize("step", [7, 1 << 20])
def test_json_in_every_shape(tmp_path, content, step, monkeypatch):
    from hone.readers import json_rows

    monkeypatch.setattr(json_rows, "_STEP", step)
    path = put(tmp_path / "a.json", content)
    assert texts(path) == WANTED and reasons(path) == []
    assert len({item.id for item in items(path)}) == len(ROWS)
    assert texts(put(tmp_path / "b.json.gz", gzip.compress(content.encode()))) == WANTED


def test_json_lines_have_the_ids_of_jsonl_and_are_split_like_it(tmp_path):
    many = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(1000))
    path = put(tmp_path / "a.json", many)
    whole = [item.text for item in items(path)]
    assert whole == texts(path, part_bytes=1000) == [f"row {n}" for n in range(1000)]
    assert [item.id for item in items(path)] == [item.id for item in items(path, part_bytes=1000)]
    array = put(tmp_path / "b.json", json.dumps([{"text": f"row {n}"} for n in range(1000)]))
    assert texts(array, part_bytes=1000) == whole


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        ('[{"text": "a"}, {"text": 1}, 3, "x", null, {"text": "b"}]', ["a", "b"], ["no_text_field"] * 4),
        ('[{"text": "a"}, {"text": "b"', ["a"], ["bad_json"]),
        ('{"text": "a"', [], ["bad_json"]),
        ('{"name": "package", "version": 3}', [], ["no_text_field"]),
        ("nonsense", [], ["bad_json"]),
        ("[]", [], ["empty"]),
        ("", [], ["empty"]),
        ("[" * 300_000, [], ["bad_json"]),
        ('{"text": "x"}'.encode("utf-16"), [], ["wrong_encoding"]),
    ],
)
def test_odd_json(tmp_path, content, good, bad):
    path = put(tmp_path / "a.json", content)
    assert (texts(path), reasons(path)) == (good, bad)


def test_chats(tmp_path):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "content": "A cat.", "tool_calls": [{"name": "look", "arguments": {"at": 1}}]},
        {"role": "user", "content": None},
    ]
    said = 'system: Be brief.\n\nuser: What is it?\n\nassistant: A cat.\n{"arguments": {"at": 1}, "name": "look"}'
    assert rendered(chat) == said
    old = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = put(tmp_path / "a.jsonl", json.dumps({"messages": chat}) + "\n" + json.dumps({"conversations": old}) + "\n")
    assert texts(path) == [said, "user: Hi\n\nassistant: Hello"]
    path = put(
        tmp_path / "b.jsonl", json.dumps({"dialog": old, "text": "no"}) + '\n{"dialog": [{"x": 1}]}\n{"dialog": []}'
    )
    assert texts(path, text_field="dialog") == ["user: Hi\n\nassistant: Hello"]
    assert reasons(path, text_field="dialog") == ["no_text_field"] * 2
    assert reasons(put(tmp_path / "c.jsonl", json.dumps({"messages": old})), text_field="body") == ["no_text_field"]
    table = pa.table({"messages": [[{"role": "user", "content": "Hi"}], None]})
    parquet.write_table(table, tmp_path / "d.parquet")
    assert texts(tmp_path / "d.parquet") == ["user: Hi"] and reasons(tmp_path / "d.parquet") == ["no_text_field"]


TABLE = [["id", "text", "url"], *[[str(n), row["text"], f"http://x/{n}"] for n, row in enumerate(ROWS)]]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
def test_csv(tmp_path, delimiter, name, quoting):
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=quoting).writerows(TABLE)
    raw = out.getvalue().encode()
    path = put(tmp_path / name, gzip.compress(raw) if name.endswith("gz") else raw)
    found = items(path, metadata_fields=("id", "absent"))
    assert [(item.text, item.url, item.metadata) for item in found] == [
        (row["text"], f"http://x/{n}", json.dumps({"id": str(n)})) for n, row in enumerate(ROWS)
    ]
    assert len({item.id for item in found}) == len(ROWS)


def test_odd_csv(tmp_path, monkeypatch):
    path = put(tmp_path / "a.csv", "a,b\n1,2\n")
    (broken,) = items(path)
    assert (broken.reason, broken.source, broken.text) == ("no_text_field", "a.csv", "columns: a,b")
    path = put(tmp_path / "a.csv", 'text,n\none,1\ntwo\n\n"th\nree",3,\n"four, 4",4\n')
    assert texts(path) == ["one", "four, 4"] and reasons(path) == ["bad_row"] * 2
    path = put(tmp_path / "a.csv", "text\ncafé\nplain\n".encode("latin-1"))
    assert texts(path) == ["plain"] and reasons(path) == ["wrong_encoding"]
    assert texts(path, encoding="auto") == texts(path, encoding="latin-1") == ["café", "plain"]
    assert texts(put(tmp_path / "a.csv", "text;n\nä;1\n".encode("utf-16"))) == ["ä"]
    assert texts(put(tmp_path / "a.csv", "\ufefftext;n\nä;1\n")) == ["ä"]
    assert reasons(put(tmp_path / "a.csv", b"")) == ["empty"]
    path = put(tmp_path / "b.csv.gz", gzip.compress(("text\n" + "a line\n" * 99999).encode())[:-20])
    assert len(texts(path)) > 1000 and reasons(path) == ["truncated"]
    from hone.readers.formats import csv_rows

    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 1000)
    path = put(tmp_path / "c.csv", 'text\nfirst\n"never closed\n' + "line\n" * 1000)
    assert texts(path) == ["first"] and reasons(path) == ["bad_csv"]
    assert reasons(put(tmp_path / "d.csv", "x" * 5000)) == ["row_too_long"]


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_arrow(tmp_path, codec):
    table = pa.table({"text": [*WANTED, None], "url": [*map(str, range(5)), "x"]})
    options = pa.ipc.IpcWriteOptions(compression=codec)
    for name, new in (("a.arrow", pa.ipc.new_file), ("s.arrow", pa.ipc.new_stream)):
        with new(str(tmp_path / name), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=2)
        path = tmp_path / name
        assert texts(path) == WANTED and reasons(path) == ["no_text_field"]
        assert items(path) == items(path, part_bytes=100)
        assert reasons(path, text_field="body") == ["no_text_field"]
        for size in (3, 100, path.stat().st_size - 40):
            broken = put(tmp_path / "broken.arrow", path.read_bytes()[:size])
            assert reasons(broken)[-1:] == ["bad_arrow"] or texts(broken)
    feather.write_feather(table, tmp_path / "a.feather", compression=codec or "uncompressed")
    assert texts(tmp_path / "a.feather") == WANTED
    assert reasons(put(tmp_path / "x.arrow", b"no table")) == ["bad_arrow"]


def test_a_nul_does_not_cost_a_document(tmp_path):
    path = put(tmp_path / "a.txt", "one\0 word")
    assert texts(path) == ["one word"] and noted(path) == {"NUL characters removed": 1}
    path = put(tmp_path / "b.jsonl", json.dumps({"text": "one\0 word"}))
    assert texts(path) == ["one word"] and noted(path) == {"NUL characters removed": 1}
    assert reasons(put(tmp_path / "c.txt", "a\0b\0c\0")) == ["binary"]
