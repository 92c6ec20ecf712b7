"""Line deduplication against plain Python, on random and real text, for every number of shards and order of documents."""

from __future__ import annotations

import random
import re
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.edits.cuts import figures
from hone.data.edits.lines import Lines
from tests.data.edits.memory import Memory

SPACE = r"[ \t\n\r\f\v]"
SENTENCE = re.compile(
    rf"(?=[^ \t\n\r\f\v]).*?(?:[.!?]+(?:[\"')\]]|[\u2019-\u201d])*(?={SPACE}|\Z)|。|！|？|(?=\n)|\Z)", re.DOTALL
)


def units(text: str, unit: str) -> list[tuple[int, int]]:
    """(start, end) of the units in characters."""
    if unit == "sentence":
        return [match.span() for match in SENTENCE.finditer(text)]
    spans, at = [], 0
    for part in re.split(r"(\n)" if unit == "line" else r"(\n(?:[ \t]*(?:\n|\Z))+)", text):
        if part.strip(" \t\n\r\f\v"):
            blank = re.match(r"(?:[ \t\r\f\v]*\n)*", part).end()
            spans.append((at + blank, at + len(part)))
        at += len(part)
    return spans


def normal(text: str) -> str:
    kept = "".join(char for char in text if ord(char) > 127 or char.isalnum())
    return re.sub("[0-9]", "0", re.sub("[A-Z]+", lambda found: found.group().lower(), kept))


def expected(corpus: Memory, spec: Lines, alive=None) -> list[str]:
    """What should be left of every text."""
    alive = np.ones(len(corpus), bool) if alive is None else alive
    order = sorted(np.flatnonzero(alive), key=lambda index: corpus.columns["id"][index])
    spans = {index: units(corpus.words[index], spec.unit) for index in order}
    holders = defaultdict(list)
    for index in order:
        for place in range(len(spans[index]) - spec.window + 1):
            parts = [corpus.words[index][a:b] for a, b in spans[index][place : place + spec.window]]
            key = tuple(map(normal, parts))
            if sum(len(part.replace("0", "")) for part in key) >= spec.min_chars:
                holders[key].append((index, place))
    gone = defaultdict(set)
    for copies in holders.values():
        if len(copies) < 2 or len({index for index, _ in copies}) < spec.min_documents:
            continue
        kept = []
        for index, place in copies:
            if kept and kept[-1][0] == index and place < kept[-1][1] + spec.window:
                continue
            if len(kept) < spec.keep:
                kept.append((index, place))
            else:
                gone[index] |= set(range(place, place + spec.window))
    result = list(corpus.words)
    for index, places in gone.items():
        text, rows = corpus.words[index], spans[index]
        starts = [start for start, _ in rows] + [len(text)]
        kept = [place for place in range(len(rows)) if place not in places]
        left = text[: starts[0]] if kept else ""
        left += "".join(text[starts[place] : starts[place + 1]] for place in kept[:-1])
        if kept:
            last = kept[-1]
            left += text[starts[last] : (starts[last + 1] if len(rows) - 1 not in places else rows[last][1])]
        result[index] = left if len(left.encode()) >= spec.min_left_bytes else ""
    return result


WORDS = [
    "Home",
    "About us",
    "page 1",
    "page 2",
    "é",
    "日本。",
    "the end.",
    'He said "no."',
    "Why? ",
    "-- ",
    "  ",
    "x = 3",
]
TEXTS = st.lists(
    st.lists(st.sampled_from([*WORDS, "\n", "\n", "\n\n", ". "]), max_size=12).map("".join), min_size=1, max_size=6
)
SPECS = st.builds(
    Lines,
    unit=st.sampled_from(["line", "paragraph", "sentence"]),
    window=st.integers(1, 3),
    min_documents=st.integers(1, 3),
    keep=st.integers(0, 2),
    min_chars=st.integers(1, 8),
    min_left_bytes=st.sampled_from([0, 5]),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(TEXTS, SPECS, st.randoms(use_true_random=False))
def test_as_plain_python(tmp_path_factory, texts, spec, draw):
    ids = [f"{number:04x}" for number in draw.sample(range(1000), len(texts))]
    border = draw.randint(0, len(texts))
    corpus = Memory(texts, ids, (border, 0, len(texts) - border))
    alive = np.array([draw.random() < 0.9 for _ in texts])
    cuts = spec.cuts(corpus, alive, tmp_path_factory.mktemp("state"))
    assert corpus.after(cuts) == expected(corpus, spec, alive)


def english(shared_data) -> list[str]:
    """Chapters of a real book and its own other edition, speeches' sort of text with repeats."""
    import gzip

    folder = shared_data / "neardup" / "gutenberg_revisions"
    texts = []
    for name in ("frankenstein-84.txt.gz", "frankenstein-frank10.txt.gz"):
        text = gzip.decompress((folder / name).read_bytes()).decode("latin-1").replace("\r", "")
        texts += [part.strip() for part in re.split(r"\n(?=Chapter|Letter|CHAPTER|LETTER)", text)]
    return texts


@pytest.mark.parametrize("unit, window", [("line", 1), ("paragraph", 1), ("sentence", 3)])
def test_real_text_in_any_shards_and_order(shared_data, tmp_path, unit, window):
    texts = english(shared_data)
    spec = Lines(unit=unit, window=window, min_documents=1)
    ids = [f"{number:016x}" for number in random.Random(3).sample(range(10**9), len(texts))]
    corpus = Memory(texts, ids)
    (tmp_path / "one").mkdir()
    cuts = spec.cuts(corpus, np.ones(len(texts), bool), tmp_path / "one")
    left = corpus.after(cuts)
    assert left == expected(corpus, spec)
    assert figures(cuts)["cut_bytes"] > 0.01 * sum(map(len, texts))  # of two editions, set in other lines
    order = random.Random(4).sample(range(len(texts)), len(texts))
    other = Memory([texts[i] for i in order], [ids[i] for i in order], (10, 0, 7, len(texts) - 17), batch=5)
    (tmp_path / "two").mkdir()
    small = spec.cuts(other, np.ones(len(texts), bool), tmp_path / "two", gathered_rows=100)
    assert other.after(small) == [left[i] for i in order]
    again = spec.cuts(other, np.ones(len(texts), bool), tmp_path / "two")  # resumed from its files
    assert other.after(again) == other.after(small)


def test_boilerplate_goes_and_code_stays(tmp_path):
    menu = "Skip to main content and then sign in\n"
    texts = [menu + f"document {chr(97 + number) * 30} has its own say, at some length\n" * 3 for number in range(4)]
    corpus = Memory(texts)
    spec = Lines(min_documents=3)
    alive = np.ones(4, bool)
    assert corpus.after(spec.cuts(corpus, alive, tmp_path)) == [texts[0], *(text[len(menu) :] for text in texts[1:])]
    corpus.columns["kind"] = np.array(["prose", "prose", "code", "code"])
    (tmp_path / "code").mkdir()
    assert corpus.after(spec.cuts(corpus, alive, tmp_path / "code")) == texts
    (tmp_path / "none").mkdir()
    assert figures(spec.cuts(corpus, ~alive, tmp_path / "none"))["cuts"] == 0
