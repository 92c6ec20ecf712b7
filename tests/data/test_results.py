"""What steps dropped, counted a shard at a time: the same as over all documents at once, with a few bytes a document."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hone.data.annotate as annotate_module
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data import EXECUTORS, FILTERS, IDENTIFIERS
from hone.data.chain import Chain
from hone.data.corpus import Corpus, lowest
from hone.data.filters.decide import added, causes, decide, ranked
from hone.data.reading import Models, read, read_task
from hone.data.results import count_by
from hone.data.stage import Data
from hone.data.work import Work
from hone.feed.best_fit import best_fit, num_sequences
from hone.feed.files.listing import File, list_source
from hone.readers.documents import Options
from tests.data.stories import story
from tests.data.test_corpus import rows_file

IDENTIFIER = IDENTIFIERS.read("hone")

FILTER_NAMES = ("length", "gopher_quality", "gopher_repetition", "fineweb")


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Corpus:
    """Several shards of stories, some short, some repeating themselves, some twice."""
    texts = [story(number, 60 + number % 90) for number in range(150)]
    texts += ["short"] * 9 + ["again and again " * 40] * 5 + [story(3, 63)] * 3 + ["• one\n• two\n• three"] * 7
    files = [tmp_path / f"in-{number}" for number in range(4)]
    monkeypatch.setattr(annotate_module, "TASK_BYTES", 1)
    state = tmp_path / "state"
    state.mkdir()
    tasks = []
    for number, folder in enumerate(files):
        rows_file(folder, texts[number::4])
        listed = annotate_module.tasks(_listed(folder, f"{number}.jsonl"), Options())
        tasks.append(
            read_task(
                state,
                number,
                listed[0],
                options=Options(),
                identifier=IDENTIFIER,
                models=Models.of(tmp_path / "no"),
            )
        )
    with EXECUTORS.read({"kind": "serial"}).open() as pool:
        list(pool.map(read, tasks))
    return Corpus([state / task.arguments["shard"] for task in tasks])


def _listed(folder: Path, name: str) -> list[File]:
    return [replace(file, name=name) for file in list_source(str(folder)).files]


def test_filters_over_shards_say_what_they_say_over_all(corpus):
    filters = [FILTERS.read({"kind": name}) for name in FILTER_NAMES]
    whole, rows = decide(filters, corpus.columns, 3)
    parts = [decide(filters, corpus.held(shard), 3) for _, shard, _, _ in corpus.spans()]
    assert np.array_equal(np.concatenate([codes for codes, _ in parts]), whole)
    for number, row in enumerate(rows):
        counts = [{key: value for key, value in part[1][number].items() if key != "samples"} for part in parts]
        total = counts[0]
        for other in counts[1:]:
            total = added(total, other)
        assert total == {key: value for key, value in row.items() if key != "samples"}
    # An oracle: each filter's own verdict on those that the ones before it left.
    kept = np.ones(len(corpus), bool)
    names = causes(filters)
    for place, (technique, row) in enumerate(zip(filters, rows)):
        keep, reasons = technique.decide(corpus.columns)
        assert row["documents_in"] == kept.sum()
        expected = Counter(reasons[kept & ~keep])
        assert {reason: count["documents"] for reason, count in row["reasons"].items()} == expected
        for index in np.flatnonzero(kept & ~keep):
            assert names[whole[index] - 1] == (place, reasons[index])
        kept &= keep
        assert row["documents_out"] == kept.sum() and row["bytes_out"] == corpus.columns["bytes"][kept].sum()
    assert np.array_equal(whole == 0, kept) and 0 < kept.sum() < len(corpus) - 10


def test_a_chain_samples_the_lowest_ids_of_each_reason_and_remembers_who_dropped_whom(corpus, tmp_path):
    spec = Data.read({"source": "python", "filters": list(FILTER_NAMES), "dedups": ["exact"], "num_samples": 2})

    class Draft:
        state = tmp_path

        def keep_time(self) -> None:
            pass

    with EXECUTORS.read({"kind": "serial"}).open() as pool:
        work = Work(Draft(), Run(quiet=True), pool)
        before = Chain(spec, corpus, work)
        before.filter()
        chain = Chain(spec, corpus, work)
        chain.filter()  # as a run that was killed meanwhile does it: from what is done
        assert json.dumps(chain.steps) == json.dumps(before.steps) and chain.dropped == before.dropped
        chain.deduplicate()
    ids, sizes = corpus.columns["id"], corpus.columns["bytes"]
    left = np.ones(len(corpus), bool)
    for row in chain.steps:
        assert row["documents_in"] == left.sum()
        step, before = row["name"], left
        for reason in row["reasons"]:
            gone = np.flatnonzero(chain.dropped_by == chain.causes.index((step, reason)) + 1)
            assert before[gone].all()
            assert row["reasons"][reason] == {"documents": len(gone), "bytes": int(sizes[gone].sum())}
            shown = [one.index for one in chain.dropped if (one.step, one.reason) == (step, reason)]
            assert shown == sorted(gone, key=lambda index: ids[index])[:2]
            left = left & ~np.isin(np.arange(len(corpus)), gone)
        assert row["documents_out"] == left.sum()
    assert np.array_equal(left, chain.kept)
    copies = [one for one in chain.dropped if one.reason == "exact_duplicate"]
    assert copies and all(one.like != one.index and left[one.like] for one in copies)


def test_columns_of_all_documents_are_small_and_those_of_a_few_are_read_alone(corpus):
    ids = np.concatenate([corpus.held(shard)["id"] for _, shard, _, _ in corpus.spans()])
    assert corpus.columns["id"].dtype == "S16" and ids.dtype.kind == "U"
    assert [ident.decode() for ident in corpus.columns["id"]] == ids.tolist()
    assert np.array_equal(np.argsort(corpus.columns["id"], kind="stable"), np.argsort(ids, kind="stable"))
    some = [len(corpus) - 1, 0, 77, 77]
    assert corpus.at("source", some) == {index: corpus.columns["source"][index] for index in some}
    assert corpus.at("id", []) == {}
    chosen = np.arange(len(corpus)) % 3 > 0
    labels = corpus.columns["language"][chosen]
    found = count_by(corpus.labels("language"), corpus.columns["bytes"], chosen)
    assert {label: row["documents"] for label, row in found.items()} == Counter(labels.tolist())
    for name in ("language", "group", "source"):
        names, codes = corpus.labels(name)
        assert names == sorted(set(names)) and [names[code] for code in codes] == corpus.columns[name].tolist()
    before = corpus.columns["family"]
    corpus.columns.forget("family")
    assert np.array_equal(before, corpus.columns["family"])


def test_beyond_forty_labels_the_rest_is_one():
    rows = {f"{number:03d}": {"documents": 1, "bytes": number} for number in range(60)}
    shown = ranked(rows)
    assert list(shown)[:2] == ["059", "058"] and len(shown) == 41
    assert shown["(other)"] == {"documents": 20, "bytes": sum(range(20))}


@given(st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=1), st.integers(1, 6), st.data())
def test_lowest_are_the_lowest(ids, count, data):
    chosen = data.draw(st.lists(st.integers(0, len(ids) - 1), unique=True))
    expected = sorted(sorted(chosen), key=lambda index: ids[index])[:count]
    assert lowest(np.array(ids, "S16"), np.array(sorted(chosen), np.int64), count).tolist() == expected


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 40))
def test_rows_are_counted_without_laying_them_out(sizes, seq_len):
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    assert num_sequences(starts, seq_len) == len(best_fit(starts, seq_len)[0]) - 1


@pytest.mark.slow
def test_two_expressions_are_told_apart(corpus, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    rows_file(source, [story(number) for number in range(30)] + ["short"])
    own = [
        {"kind": "expression", "keep": "urls < 10"},
        {"kind": "expression", "keep": "words < 900000", "reason": "endless"},
        {"kind": "expression", "keep": "words > 3"},
    ]
    spec = {"source": str(source), "tokenizer": {"vocab_size": 400}, "filters": own, "dedups": []}
    made = Data.read(spec).make(tmp_path / "out", run=Run(quiet=True))
    stats = json.loads((made.folder / "stats.json").read_text())
    assert stats["warnings"] == [
        "filter 'expression' (urls < 10) dropped nothing",
        "filter 'expression' (endless: words < 900000) dropped nothing",
    ]
    assert list(stats["steps"][3]["reasons"]) == ["words > 3"]
    with pytest.raises(SpecError, match=r"filter 'expression' \(words > 9000\) dropped all 31 documents"):
        Data.read({**spec, "filters": [{"kind": "expression", "keep": "words > 9000"}]}).make(
            tmp_path / "none", run=Run(quiet=True)
        )
