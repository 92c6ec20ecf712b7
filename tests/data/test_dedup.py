"""Every deduplication, through the corpus: the lowest id stays and the dead do not count."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hone.data import DEDUPS
from hone.data.annotate import annotate, read_items
from hone.data.corpus import Corpus
from hone.feed.files.listing import list_source
from hone.readers.documents import Options
from hone.text.langid.identify import Identifier


def corpus_of(tmp_path, texts: list[str], name: str = "in") -> Corpus:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / f"{name}.parquet"
    annotate(read_items(list_source(str(folder)).files, Options()), out, identifier=Identifier())
    return Corpus([out])


@pytest.mark.parametrize(
    "name", [name for name in DEDUPS if name != "semantic"]
)  # that needs vectors: test_semantic.py
def test_the_lowest_id_stays_and_the_dead_do_not_count(tmp_path, name):
    text = "the quick brown fox jumps over the lazy dog and then it sleeps for a long time " * 3
    corpus = corpus_of(
        tmp_path, [text, "something else entirely, with enough words to make shingles", text, text, "?!"]
    )
    technique = DEDUPS.read(name)
    ids = corpus.columns["id"]
    kept = np.ones(5, bool)
    lowest = min((0, 2, 3), key=lambda index: ids[index])
    state = tmp_path / "state"
    state.mkdir()
    stands = technique.compare(corpus, kept, state).stands
    assert [int(stands[index]) for index in (0, 2, 3)] == [lowest] * 3 and stands[1] == 1 and stands[4] == 4
    kept[lowest] = False
    (tmp_path / "other").mkdir()
    stands = technique.compare(corpus, kept, tmp_path / "other").stands
    rest = sorted({0, 2, 3} - {lowest}, key=lambda index: ids[index])
    assert stands[lowest] == lowest and stands[rest[1]] == stands[rest[0]] == rest[0]
