"""Near-duplicates against published truth, exact Jaccard similarity and other editions of the same books."""

from __future__ import annotations

import gzip
import itertools
import random
import re

import numpy as np
import pytest

from hone.data import DEDUPS
from hone.data.annotate import annotate
from hone.data.corpus import Corpus
from hone.data.dedup.minhash import MinHash
from hone.data.language import Identifier
from hone.data.readers.listing import list_source
from hone.data.readers.read import Options


def shingles(text: str, n: int = 5) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}


def jaccard(one: set, other: set) -> float:
    return len(one & other) / len(one | other)


def clusters(texts: list[str], **options) -> list[set[int]]:
    technique = MinHash(**options)
    return [set(group.tolist()) for group in technique.clusters(np.array([technique.sign(text) for text in texts]))]


def test_articles_with_published_truth(shared_data):
    folder = shared_data / "neardup"
    rows = [line.split(" ", 1) for line in (folder / "articles_100.train").read_text(encoding="utf8").splitlines()]
    truth = {frozenset(line.split()) for line in (folder / "articles_100.truth").read_text().splitlines()}
    assert {frozenset(rows[i][0] for i in group) for group in clusters([text for _, text in rows])} == truth


@pytest.mark.parametrize("book", ["frankenstein", "pride-and-pr", "the-adventur"])
def test_chapters_of_other_editions_meet(shared_data, book):
    files = sorted((shared_data / "neardup" / "gutenberg_revisions").glob(f"{book}*"))
    chapters = []
    for file in (files[0], files[-1]):
        text = gzip.decompress(file.read_bytes()).decode("latin-1").replace("\r", "")
        parts = re.split(r"(?m)^\s*(?:CHAPTER|Chapter|LETTER|Letter|ADVENTURE)\s+[IVXLC\d]+\b.*$", text)
        chapters += [part for part in parts if len(part) > 3000]
    groups = clusters(chapters)
    together = {frozenset(pair) for group in groups for pair in itertools.combinations(sorted(group), 2)}
    sets = [shingles(chapter) for chapter in chapters]
    similar = {
        frozenset((i, j)): jaccard(sets[i], sets[j])
        for i, j in itertools.combinations(range(len(chapters)), 2)
        if abs(len(chapters[i]) - len(chapters[j])) < 0.3 * len(chapters[i])
    }
    close = {pair for pair, value in similar.items() if value >= 0.9}
    assert len(close & together) >= 0.98 * len(close) and len(together) >= 5
    assert all(jaccard(*(sets[i] for i in pair)) > 0.4 for pair in together)


def test_signature_agreement_estimates_jaccard():
    draw = random.Random(0)
    words = [f"w{draw.randrange(500)}" for _ in range(600)]
    technique = MinHash(bands=64, rows=8)
    for changed in (5, 20, 60):
        other = list(words)
        for place in draw.sample(range(600), changed):
            other[place] = "new"
        one, two = " ".join(words), " ".join(other)
        agreement = (technique.sign(one) == technique.sign(two)).mean()
        assert abs(agreement - jaccard(shingles(one), shingles(two))) < 4 * (0.25 / 512) ** 0.5


def corpus_of(tmp_path, texts: list[str], name: str = "in") -> Corpus:
    import json

    folder = tmp_path / name
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / f"{name}.parquet"
    annotate(list_source(str(folder)).files, out, options=Options(), identifier=Identifier())
    return Corpus([out])


@pytest.mark.parametrize("name", list(DEDUPS))
def test_the_lowest_id_stays_and_the_dead_do_not_count(tmp_path, name):
    text = "the quick brown fox jumps over the lazy dog and then it sleeps for a long time " * 3
    corpus = corpus_of(
        tmp_path, [text, "something else entirely, with enough words to make shingles", text, text, "?!"]
    )
    technique = DEDUPS.read(name)
    ids = corpus.columns["id"]
    alive = np.ones(5, bool)
    lowest = min((0, 2, 3), key=lambda index: ids[index])
    state = tmp_path / "state"
    state.mkdir()
    stands = technique.representatives(corpus, alive, state)
    assert [int(stands[index]) for index in (0, 2, 3)] == [lowest] * 3 and stands[1] == 1 and stands[4] == 4
    alive[lowest] = False
    (tmp_path / "other").mkdir()
    stands = technique.representatives(corpus, alive, tmp_path / "other")
    rest = sorted({0, 2, 3} - {lowest}, key=lambda index: ids[index])
    assert stands[lowest] == lowest and stands[rest[1]] == stands[rest[0]] == rest[0]


def test_wordless_and_short_texts():
    assert clusters(["", "!!!", "?"]) == []
    assert clusters(["two words", "two words", "two"]) == [{0, 1}]
