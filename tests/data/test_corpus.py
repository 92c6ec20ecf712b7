"""Shards hold every document with its columns, whatever else goes wrong beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hone.data.annotate as annotate_module
from hone.base.run import Run
from hone.data.annotate import annotate, read_items, tasks
from hone.data.corpus import Corpus
from hone.data.signals import SIGNALS, signals, signals_of
from hone.data.stage import Data
from hone.feed.files.listing import File, list_source
from hone.feed.load import PackedTokens
from hone.readers.documents import Options
from hone.text.batch import Texts
from hone.text.langid.identify import Identifier


def rows_file(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def shard_of(tmp_path: Path, texts: list[str], **options) -> tuple[Path, dict]:
    out = tmp_path / "shard.parquet"
    files = list_source(str(rows_file(tmp_path / "in", texts))).files
    return out, annotate(read_items(files, Options()), out, identifier=Identifier(), **options)


def test_columns_and_texts_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(annotate_module, "BATCH_BYTES", 40_000)
    texts = [f"document number {number}, which says little" for number in range(5000)]  # several row groups
    out, summary = shard_of(tmp_path, texts)
    corpus = Corpus([out])
    assert summary["rows"] == len(corpus) == 5000 and corpus.num_bytes == sum(map(len, texts))
    chosen = np.arange(5000) % 777 == 5
    (_, shard, first, end) = next(corpus.spans())
    assert (first, end) == (0, 5000)
    assert dict(corpus.texts(shard, first, chosen)) == {int(i): texts[i] for i in np.flatnonzero(chosen)}
    for wanted in (chosen, np.ones(5000, bool)):
        batches = list(corpus.batches(shard, first, wanted))
        assert np.array_equal(np.concatenate([indices for indices, _ in batches]), np.flatnonzero(wanted))
        assert [text for _, batch in batches for text in batch.strings()] == [texts[i] for i in np.flatnonzero(wanted)]
        assert len(batches) > 1
    expected = signals(texts[42])
    assert {name: corpus.columns[name][42].item() for name in SIGNALS} == pytest.approx(expected, nan_ok=True)
    assert len(set(corpus.columns["id"])) == 5000


def test_a_document_that_breaks_the_signals_is_set_aside(tmp_path, monkeypatch):
    def refuse(texts: Texts, languages: list[str]) -> dict:
        if any("poison" in text for text in texts.strings()):
            raise ValueError("cannot count this")
        return signals_of(texts)

    monkeypatch.setattr(annotate_module, "signals_of", refuse)
    _, summary = shard_of(tmp_path, ["fine", "poison", "also fine"])
    assert summary["rows"] == 2
    assert summary["broken"] == {"failed_ValueError": {"documents": 1, "bytes": 6}}


def test_the_limit_stops_before_the_document_that_would_pass_it(tmp_path):
    _, summary = shard_of(tmp_path, ["a" * 10] * 10, max_bytes=35)
    assert (summary["rows"], summary["bytes"], summary["full"]) == (3, 30, True)


def test_tasks_keep_order_and_size():
    files = [File(Path("x"), f"{number}", 3 << 20, "text") for number in range(7)]
    groups = tasks(files, Options())
    assert [file for group in groups for file in group] == files and [len(group) for group in groups] == [2, 2, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", "é日", "x\u2028"])
def test_ten_megabytes_on_one_line_go_through(tmp_path, unit):
    (tmp_path / "in").mkdir()
    size = 10_000_000 if unit == "a" else 500_000
    (tmp_path / "in" / "line.txt").write_text(unit * (size // len(unit.encode())), encoding="utf8")
    (tmp_path / "in" / "other.txt").write_text("one more document")
    spec = Data.read({"source": str(tmp_path / "in"), "filters": [], "dedups": [], "tokenizer": {"vocab_size": 300}})
    artifact = spec.make(tmp_path / "out", run=Run(quiet=True))
    assert artifact.figures["input_bytes"].value > 0.99 * size
    packed = [PackedTokens(artifact.folder, split) for split in ("train", "val")]
    assert sum(split.num_bytes for split in packed) == artifact.figures["kept_bytes"].value
