"""What a training counts: tokens without padding, epochs and positions, in the plan, the logs and the record, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.train.stage import Train
from tests.conftest import byte_tokenizer
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.ranks import trained

SIZES = [21, 33, 26, 18, 30, 25, 19, 29, 24, 31, 20, 22, 27, 23, 28, 32]
"""Tokens of documents, end of text included: none fits beside another into sequences of 32, and none is cut."""
SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"lr": 1e-3},
}
QUIET = Run(quiet=True)


def packed(folder: Path, sizes: list[int], kind: str) -> Path:
    """A data artifact (contents only) of documents of so many tokens, packed as `kind` says."""
    tokenizer, draw = byte_tokenizer(), np.random.default_rng(0)
    tokenizer.save_pretrained(folder)
    (folder / "tokens").mkdir()
    splits = {}
    for split, some in (("train", sizes), ("val", sizes[:3])):
        documents = [[*draw.integers(5, 200, size - 1).tolist(), tokenizer.eos_token_id] for size in some]
        np.concatenate(documents).astype("<u2").tofile(folder / "tokens" / f"{split}.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", np.cumsum([0, *some]).astype(np.int64))
        splits[split] = {"tokens": sum(some), "documents": len(some), "bytes": sum(some)}
    meta = {"dtype": "uint16", "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "splits": splits}
    meta["packing"] = {"kind": kind, "lengths": []}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize(("kind", "count", "read"), [("best_fit", 16, sum(SIZES) - 16), ("stream", 13, sum(SIZES))])
def test_plan_logs_and_record_count_what_was_read(kind, count, read, tmp_path):
    """Whole epochs. A document's last token is no input where documents are packed whole; in a stream it is one, before padding too."""
    pytest.importorskip("numba")
    data = Artifact.read(packed(tmp_path / "data", SIZES, kind))
    epochs = 2 if kind == "best_fit" else 4
    spec = Train.read({**SPEC, "steps": epochs * count // 4})
    made = spec.make(tmp_path / "train-it", {"data": data}, QUIET)
    figures, tokens = made.figures, epochs * read
    for name, value in (("train_tokens", tokens), ("epochs", epochs), ("padding", 1 - read / (count * 32))):
        assert figures[name].value == pytest.approx(value) and figures[name].estimate.value == pytest.approx(value)
    assert f"of {spec.steps * 128} positions" in figures["train_tokens"].note
    rows = [row["tokens"] for row in read_jsonl(made.folder / "steps.jsonl") if "loss" in row]
    assert rows[-1] == tokens and len(set(np.diff([0, *rows]))) > 1, "steps have different numbers of tokens"
    timing = read_jsonl(made.folder / "log" / "timing.jsonl")
    assert [row["tokens_per_s"] * row["time_s"] for row in timing] == pytest.approx(np.diff([0, *rows]).tolist())
    some = timing[2:]  # without the two steps of the warm-up
    rate = sum(row["tokens_per_s"] * row["time_s"] for row in some) / sum(row["time_s"] for row in some)
    assert figures["tokens_per_s"].value == pytest.approx(rate)
    assert facts_of(data).packed("train", 32) == PackedTokens(data.folder).packing(32)
    one_pass = Train.read(SPEC).plan({"data": facts_of(data)}, describe("cpu"))
    assert one_pass.steps == -(-count // 4)
    asked = Train.read({**SPEC, "tokens": 3 * read}).plan({"data": facts_of(data)}, describe("cpu"))
    assert asked.steps == -(-3 * count // 4) and asked.estimates["train_tokens"].value >= 3 * read


def test_every_division_over_ranks_counts_the_same_tokens(tmp_path):
    """16 sequences in two steps: each document once, however sequences, layers and copies lie on two ranks."""
    pytest.importorskip("numba")
    settings = [
        {},
        {"data_parallel": "zero2", "gradient_accumulation_steps": 2},
        {"data_parallel": {"kind": "local_sgd", "sync_every": 2, "num_workers": 2}},
        {"context_parallel": "ring", "context_parallel_degree": 2},
        {"parallelism": {"tensor_parallel_degree": 2}},
        {"parallelism": {"pipeline_parallel_degree": 2}, "gradient_accumulation_steps": 2},
    ]
    folder = packed(tmp_path / "data", SIZES, "best_fit")
    ended = together(2, trained, str(folder), str(tmp_path), settings)
    first = int((PackedTokens(folder).sequences(np.arange(8), 32, 0).targets >= 0).sum())
    for setting, *ranks in zip(settings, *(one.result for one in ended), strict=True):
        for steps in ranks:
            assert steps[-1][2] == sum(SIZES) - 16, setting
            if "sync_every" not in str(setting):
                assert steps[0][2] == first, setting


def test_repeated_data_is_refused_or_said(tmp_path, capsys):
    folder = packed(tmp_path / "data", [18], "stream")
    facts = {"data": facts_of(Artifact.read(folder))}
    spec = {**SPEC, "seq_len": 17, "batch_size": 8}
    with pytest.raises(
        SpecError, match=r"batch_size 8 .* has 1 sequence of 17 tokens in all: each would be 8 times"
    ) as caught:
        Train.read(spec).plan(facts, describe("cpu"))
    assert "batch_size to at most 1" in caught.value.fix
    unknown = facts["data"].model_copy(update={"where": "data-planned", "exact": False})
    assert Train.read(spec).plan({"data": unknown}, describe("cpu")).steps == 1
    spec |= {"batch_size": 1, "gradient_accumulation_steps": 1, "steps": 9}
    plan = Train.read(spec).plan(facts, describe("cpu"))
    assert plan.estimates["epochs"].value == 9
    (said,) = plan.notes
    assert "read 9 times by 9 steps x batch_size 1" in said and "1 sequence of 17 tokens" in said
    Train.read(spec).make(tmp_path / "train-it", {"data": Artifact.read(folder)}, Run())
    assert said in " ".join(capsys.readouterr().err.split())
    some = Train.read({**spec, "batch_size": 3, "seq_len": 10, "steps": 1}).plan(facts, describe("cpu"))
    assert some.notes == (
        "note: the data have 2 sequences of 18 tokens in all, fewer than batch_size 3: every batch has some of them twice",
    )
