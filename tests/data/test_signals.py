"""Signals of a batch equal the plain count of each document, in any script, and stay linear on hostile text."""

from __future__ import annotations

import gzip
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import ArtifactError, SpecError
from hone.data import FILTERS, SCORERS
from hone.data.corpus import schema
from hone.data.expression import columns_of
from hone.data.signals import SIGNALS, signals, signals_of
from hone.text.batch import Texts
from hone.text.normalize import normalize
from hone.text.signals import measure
from tests.text.signals import oracle

LEXICON = ("darn", "bad word", "3 cats", "Straße", "...")
_MADE = """
a bb the The THE of use uses Terms terms privacy policy cookie cookies. lorem Lorem ipsum javascript JavaScript; to be
and that have with #x 3 ... … • - ● word. word! word?" it.) (x) {y} http://a.b https://c www.d. 12 3k likes likes,
views items in cart read more... more… sign-in Sign-In! darn bad Bad word, [3] end.[3] end.[edit] 。 你好。 「你好」,ok今天天气 ไปโรงเรียน,น้ำ មាន្ត្រី។ က္ကမြန်မာ། བོད་སྐད་ཡིག་ཨ་། a་b हिन्दी। Straße
STRASSE İSTANBUL Σας ΣΑΣ Ⅷ ² e\u0301 the, tree movie table made ape joe@x.org a..b@c.de .joe@x.co joe@x.c 10.0.0.1 8.8.8.8
8.8.8.8.8 192.168.1.1 1.2.3.04 +14155550123 +44 20 7946 0958 (415) 555-0123 415-555-0123 4111 1111 1111 1111
4111111111111111 3782 822463 10005 0 1984 readmore... CAPS LOCK ON 3
"""
PIECES = [*_MADE.split(), "", "x" * 40, "y" * 260, "z" * 1001]
SPACES = (
    [" "] * 12
    + ["\n"] * 3
    + ["\n\n", "  ", "\t", "\u00a0", "\u3000", "\u2028", "\n\n\n", " \n", "\x1c", "\x0b", "\n \n"]
)
mixed_text = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(SPACES)), max_size=80).map(
    lambda parts: "".join(piece + space for piece, space in parts)
)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
few_words = st.lists(st.sampled_from(["a", "bb", "the", "#x", "3", "..."]), max_size=80).map(" ".join)


def check(texts: list[str]) -> None:
    columns = signals_of(Texts.of(texts))
    assert list(columns) == list(SIGNALS)
    assert {name: str(column.dtype) for name, column in columns.items()} == {
        name: signal.kind for name, signal in SIGNALS.items()
    }
    columns["toxic_words"] = measure.columns_of(measure.counts_of(Texts.of(texts), LEXICON)[0])["toxic_words"]
    for index, text in enumerate(texts):
        for name, value in oracle.signals(text, LEXICON).items():
            assert columns[name][index] == pytest.approx(value, rel=1e-12), (name, text)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(mixed_text, max_size=4))
def test_signals_of_made_text_equal_the_plain_count(texts):
    check(texts)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(any_text, max_size=4))
def test_signals_of_random_unicode_equal_the_plain_count(texts):
    check(texts)


def test_a_line_that_ends_with_read_more_is_boilerplate_wherever_it_stands():
    check(["read more...\nof the day", "a word, read more…\nanother line\nRead more...\n\nthe end", "of\nread more..."])


@settings(max_examples=200)
@given(few_words)
def test_signals_of_repeating_words_equal_the_plain_count(text):
    check([text])


@settings(max_examples=300)
@given(st.text("0123456789+().- @aA_é\n", max_size=60))
def test_personal_data_equals_the_plain_count(text):
    check([text])


def real_texts(folder) -> list[str]:
    rows = gzip.decompress((folder / "langid" / "lingua-sentences-75x1000.jsonl.gz").read_bytes()).decode().splitlines()
    texts = [
        " ".join(json.loads(row)["text"] for row in rows[at : at + 20]) for at in range(0, len(rows), 1000)
    ]  # each language
    book = gzip.decompress((folder / "books" / "en-dracula.txt.gz").read_bytes()).decode("utf8", "replace")
    code = gzip.decompress((folder / "code" / "permissive-code.jsonl.gz").read_bytes()).decode().splitlines()
    texts += [book[at : at + 6000] for at in range(0, 60_000, 6000)]
    texts += [json.loads(row)["text"][:8000] for row in code[::30]]
    return [normalize(text) for text in texts]


def test_signals_of_real_text_equal_the_plain_count(shared_data):
    texts = real_texts(shared_data)
    assert len(texts) > 90
    check(texts)


def test_a_long_document_equals_the_plain_count(shared_data):
    book = (shared_data / "books" / "en-war-and-peace.txt.gz").read_bytes()
    check([normalize(gzip.decompress(book).decode("utf8", "replace"))[:400_000]])


@pytest.mark.slow
def test_many_different_words_outgrow_the_tables():
    words = [f"w{number:x}" for number in range(70_000)]
    check([" ".join(words), " ".join(words[:300]), " ".join(words[::-1])])
    pages = [" ".join(words[at : at + 1000]) for at in range(0, 70_000, 1000)]
    check(pages + pages[:3])


def test_a_text_has_the_same_signals_alone_and_in_any_batch(shared_data):
    texts = real_texts(shared_data)
    whole = signals_of(Texts.of(texts))
    order = random.Random(0).sample(range(len(texts)), len(texts))
    shuffled = signals_of(Texts.of([texts[index] for index in order]))
    for name in SIGNALS:
        np.testing.assert_array_equal(whole[name][order], shuffled[name], err_msg=name)
    again = signals_of(Texts(Texts.of(texts).data, Texts.of(texts).offsets[3:9]))
    for name in SIGNALS:
        np.testing.assert_array_equal(whole[name][3:8], again[name], err_msg=name)


def test_equal_texts_and_only_they_have_equal_hashes():
    rng = random.Random(0)
    texts = {
        "".join(rng.choice(["a", "b", " ", "\n", "é", "aaaaaaaa"]) for _ in range(rng.randint(0, 12)))
        for _ in range(50_000)
    }
    texts |= {"", "\0", "\0\0", "a\0", "a b", "a  b", "a\tb", "a\nb", "a\n\nb", "ab", "ab\n", "\nab", "ab\n\n"}
    hashes = signals_of(Texts.of(sorted(texts)))["text_hash"]
    assert len(np.unique(hashes)) == len(texts)
    assert signals("The same text.")["text_hash"] == signals("The same text.")["text_hash"]


def test_nothing_is_measured_as_nothing():
    columns = signals_of(Texts.of([]))
    assert set(columns) == set(SIGNALS) and all(len(column) == 0 for column in columns.values())
    row = signals("")
    assert row["words"] == row["lines"] == row["bytes"] == 0 and row["flesch"] == row["mtld"] == 0


def test_a_lexicon_is_files_of_lines(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("# mild\ndarn\n\nbad word\ndarn\n", encoding="utf8")
    scorer = SCORERS.read({"kind": "lexicon", "words": [str(path)]})
    assert scorer.train(tmp_path / "models") == {"entries": 2}
    opened = scorer.open(tmp_path / "models")
    assert opened.columns(Texts.of(["Darn, a bad  word!", "badword", ""]))["toxic_words"].tolist() == [2 / 4, 0, 0]
    assert opened.columns(Texts.of([]))["toxic_words"].dtype == np.float64
    path.write_text("# nothing\n", encoding="utf8")
    with pytest.raises(SpecError, match="no entry"):
        scorer.train(tmp_path)
    with pytest.raises(SpecError, match="the lexicon: no file"):
        SCORERS.read({"kind": "lexicon", "words": ["absent.txt"]}).train(tmp_path)
    with pytest.raises(SpecError, match="no file"):
        SCORERS.read("lexicon").train(tmp_path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        scorer.open(tmp_path / "nowhere")


@settings(max_examples=200)
@given(st.text(alphabet="ab \t\r\n\u0301e", max_size=40))
def test_normalize_is_idempotent(text):
    assert normalize(normalize(text)) == normalize(text)


def test_counts_by_hand():
    text = "The cat sat. It is #1...\n- a bullet\n- a bullet\n\nSee https://x.org or lorem ipsum {"
    row = signals(text)
    assert row["words"] == 18 and row["lines"] == 4 and row["stop_words"] == 1
    assert row["bullet_lines"] == 0.5 and row["dup_lines"] == 0.25 and row["ellipsis_lines"] == 0.25
    assert row["hash_ratio"] == pytest.approx(1 / 18) and row["alpha_words"] == pytest.approx(14 / 18)
    assert row["urls"] == row["lorem_ipsum"] == row["braces"] == 1 and row["sentences"] == 2


def test_personal_data_by_hand():
    text = (
        "Write to joe.smith+news@mail.example.org, call (415) 555-0123 or +44 20 7946 0958, from 8.8.4.4 not 192.168.0.7; "
        "pay with 4111 1111 1111 1111, never with 4111 1111 1111 1112; version 1.2.3, born 1984-05-06."
    )
    row = signals(text)
    assert (row["emails"], row["phones"], row["public_ips"], row["cards"]) == (1, 2, 1, 1)


def test_reading_ease_and_diversity_order_texts_as_they_should():
    easy = "The cat sat on the mat. The dog ran to the cat. The cat ran off. " * 20
    hard = (
        "Jurisprudential considerations notwithstanding, epistemological uncertainty characterizes deliberation. " * 20
    )
    assert signals(easy)["flesch"] > 90 > 0 > signals(hard)["flesch"]
    rich = " ".join(f"word{number}" for number in range(200))
    assert signals(rich)["mtld"] == 200 > 20 > signals(easy)["mtld"] > 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "unit", [".", " ", "a", "1", "\n", "a ", "#", "…", "http://", "\u0301", "漢", ".)", "1 ", "@", "a@", "1.", "("]
)
def test_hostile_runs_take_linear_time(unit):
    text = normalize("x" + unit * (1_000_000 // len(unit)) + "x")
    row = signals(text)
    assert row["bytes"] == len(text.encode()) and row["words"] == len(text.split()) + (
        text.count("漢") + 1 if "漢" in text else 0
    )
    assert row["emails"] == 0 and re.match("x", text)


def test_filters_use_columns_that_exist():
    there = {*schema().names, "toxic_words"}
    for name in FILTERS:
        technique = FILTERS.read(name)
        for rule in technique.rules():
            assert columns_of(rule.keep) <= there, (name, rule)
        assert columns_of(technique.when) <= there
