"""Samples at evaluations: what the model writes then, step by step, in steps.jsonl and the report, and after a kill."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.cost.steps import forward_seconds
from hone.feed.load import IGNORE, Batch, PackedTokens
from hone.measure.machine import machine_of
from hone.model.hf import load
from hone.model.tokenizer import load_tokenizer
from hone.report import build
from hone.train.live.samples import PROMPT_TOKENS, prompts_of
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills, write_data

SPEC = {
    "model": SHAPE.model_copy(update={"num_layers": 2}).model_dump(), "batch_size": 4, "seq_len": 32, "steps": 6,
    "optimizer": {"lr": 3e-3}, "validation": {"interval": 3, "samples": 2, "sample_tokens": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("made") / "data-text")


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    return Train.read(SPEC).make(
        tmp_path_factory.mktemp("trained") / "train-it", {"data": Artifact.read(data)}, Run(quiet=True)
    )


def test_the_last_samples_are_what_the_saved_model_writes(made, data):
    rows = [row for row in read_jsonl(made.folder / "steps.jsonl") if "val_loss" in row]
    assert [row["step"] for row in rows] == [3, 6] and all(len(row["samples"]) == 2 for row in rows)
    model, tokenizer = load(made.folder, dtype=torch.float32), load_tokenizer(data)
    batch = next(iter(PackedTokens(data, "val").in_order(2, 32)))
    for sample, tokens, ids in zip(rows[-1]["samples"], batch.tokens, batch.document_ids):
        ids = tokens[ids == ids[0]][:PROMPT_TOKENS].tolist()
        length = len(ids)
        assert sample["prompt"] == tokenizer.decode(ids)
        with torch.no_grad():
            for _ in range(8):  # each token by a pass over the whole text
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
                if ids[-1] in model.config.eos_token_ids:
                    break
        assert sample["text"] == tokenizer.decode(ids[length:])


def test_the_report_has_a_table_of_them(made, tmp_path):
    page = build(made.folder.parent, tmp_path / "report").read_text()
    assert "text written during the training" in page and '<td class="n">3</td>' in page


def test_a_prompt_of_a_conversation_is_all_before_its_answer():
    tokens = np.array([[4, 5, 6, 7, 8, 9]])
    targets = np.array([[IGNORE, IGNORE, 7, 8, IGNORE, IGNORE]])
    assert [one.tolist() for one in prompts_of(Batch(tokens, targets, np.array([[0, 0, 0, 0, 1, 1]])))] == [[4, 5, 6]]
    plain = Batch(np.arange(40)[None], np.arange(1, 41)[None], np.zeros((1, 40), np.int32))
    assert len(prompts_of(plain)[0]) == PROMPT_TOKENS


def test_a_plan_counts_the_passes_that_write_them(data):
    """Each token of each sample of the three evaluations of six steps is a pass over one token."""
    parents, machine = {"data": facts_of(Artifact.read(data))}, machine_of(Run(quiet=True))
    spec = {**SPEC, "steps": 6, "validation": {"interval": 2, "sequences": 4}}
    plain = Train.read(spec).plan(parents, machine)
    with_samples = {**spec["validation"], "samples": 5, "sample_tokens": 7}
    more = Train.read({**spec, "validation": with_samples}).plan(parents, machine)
    dims = plain.facts.config.dims()
    token = forward_seconds(dims, machine, tokens=1, seq_len=SPEC["seq_len"], dtype="float32").value
    added = more.estimates["time_s"].value - plain.estimates["time_s"].value
    assert added == pytest.approx(3 * 5 * 7 * token, rel=1e-6) and token > 0


def test_what_no_rank_could_write_is_refused(data, tmp_path):
    for more in ({"compile": True}, {"parallelism": {"offload": "host"}}):
        with pytest.raises(SpecError, match=r"validation\.samples needs a whole language model"):
            Train.read({**SPEC, **more}).make(tmp_path / "no", {"data": Artifact.read(data)}, Run(quiet=True))


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(made, data, tmp_path):
    spec = {**SPEC, "checkpoint": {"interval": 2}}
    assert content_after_kills(spec, data, tmp_path / "train-killed", [3, 5]) == made.content
