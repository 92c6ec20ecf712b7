"""Steps that are skipped as outliers: by the rule, without a trace in weights and state, on all ranks, and the same after a resume."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import HoneError, SpecError
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.train import loop
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine
from hone.train.spikes.skip_step import SkipStep, Spikes
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY, write_data
from tests.train.ranks import made

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 32,
    "max_grad_norm": 0.0,
    "validation": {"sequences": 4},
    "checkpoint": {"interval": 5},
    "optimizer": {"lr": 3e-3, **STEADY, "skip_step": {"rolling_interval_length": 12, "sigma_factor": 4.0}},
}
QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """The usual data, of which the sequences of the 26th step are noise."""
    folder = write_data(tmp_path_factory.mktemp("made") / "data-spoiled")
    data = PackedTokens(folder)
    order = data.order(0, 0, data.num_sequences(32))
    tokens = np.memmap(folder / "tokens" / "train.bin", "<u2", mode="r+")
    for place in order[100:104]:
        tokens[place * 32 : place * 32 + 32] = np.random.default_rng(1).integers(100, 250, 32)
    tokens.flush()
    return folder


@pytest.fixture(scope="module")
def whole(spoiled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("line") / "train-whole"
    return Train.read(SPEC).make(folder, {"data": Artifact.read(spoiled)}, QUIET)


def test_the_rule_is_mean_and_deviations_of_the_last_values():
    """Against numpy: windows of eight, none judged before four; the limit takes the place of what is above it."""
    draw = np.random.default_rng(3)
    losses, norms = (2 + 0.1 * draw.standard_normal((2, 60))).tolist()
    losses[20], losses[21], norms[33], losses[40] = 9.0, 5.0, 4.0, math.nan
    losses[2] = 30.0  # too early to judge
    spikes, windows, skipped = Spikes(SkipStep(rolling_interval_length=8, sigma_factor=5)), ([], []), []
    for place, values in enumerate(zip(losses, norms, strict=True)):
        over = False
        for window, value in zip(windows, values, strict=True):
            last = window[-8:]
            if len(last) >= 4:
                limit = np.mean(last) + 5 * np.std(last)
                over |= not value <= limit
                value = value if value <= limit else limit
            window.append(value)
        if place == 30:  # as a checkpoint keeps it
            kept, spikes = json.loads(json.dumps(spikes.state())), Spikes(spikes.spec)
            spikes.restore(kept)
        said = spikes.judge(*values)
        assert bool(said) == over
        skipped += [place] if said else []
    assert {20, 21, 33, 40} <= set(skipped) and 2 not in skipped and len(skipped) < 8
    assert Spikes(None).judge(math.inf, math.nan) == "" and Spikes(None).state() == {}


def test_a_new_loss_level_is_accepted_and_nan_ends():
    spikes = Spikes(SkipStep(rolling_interval_length=16))
    for place in range(32):
        assert not spikes.judge(2 + 0.01 * (place % 3), 1.0 + 0.01 * (place % 3))
    skipped = [bool(spikes.judge(3.0, 1.0)) for _ in range(16)]
    assert skipped[0] and not skipped[-1] and not spikes.stuck
    for _ in range(16):
        assert not spikes.stuck and spikes.judge(math.nan, math.inf)
    assert spikes.stuck


def test_a_skipped_step_changes_nothing_but_the_count(spoiled):
    """Also by gradients that are not finite; without the field they end the training, before half a window too."""
    data = PackedTokens(spoiled)
    trainer = Trainer(
        build(SHAPE.config(data.vocab_size), seed=1),
        steps=9,
        schedule=Cosine(warmup=1),
        optimizer=AdamW(skip_step=SkipStep(rolling_interval_length=4)),
        precision="bf16",
    )
    for step in range(3):
        assert not trainer.step(data.batch(step, 4, 32, 0)).skipped
    before = {name: tensor.clone() for name, tensor in trainer.update.state().items()}
    objective = trainer._objective
    trainer._objective = lambda *arguments: objective(*arguments) * math.nan
    step = trainer.step(data.batch(3, 4, 32, 0))
    assert step.skipped and step.row()["loss"] is None and step.row()["grad_norm"] is None and "loss nan" in step.why
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.update.state().items())
    assert (trainer.done, trainer.tokens) == (4, 4 * 128)
    with pytest.raises(HoneError, match="diverged at step 7 after 3 skipped ones: loss nan"):
        for number in range(4, 8):
            trainer.step(data.batch(number, 4, 32, 0))


def test_the_record_names_what_was_skipped(whole):
    rows = [row for row in read_jsonl(whole.folder / "steps.jsonl") if "loss" in row]
    assert [row["step"] for row in rows if row.get("skipped")] == [26]
    assert "loss" in rows[25]["why"] and rows[25]["loss"] > 1.2 * rows[24]["loss"]
    figure = whole.figures["skipped_steps"]
    assert figure.value == 1 and figure.note.startswith("steps 26; spikes 1, overflows of fp16 0; 128 tokens")


def test_without_skip_step_every_batch_is_used(spoiled, tmp_path, whole):
    spec = Train.read({**SPEC, "optimizer": {**SPEC["optimizer"], "skip_step": None}})
    assert spec.identity() != Train.read(SPEC).identity()
    assert Train.read({"optimizer": {"kind": "muon", "skip_step": True}}).optimizer.skip_step == SkipStep()
    other = spec.make(tmp_path / "train-other", {"data": Artifact.read(spoiled)}, QUIET)
    assert "skipped_steps" not in other.figures and other.content != whole.content


@pytest.mark.parametrize("kill_at", [7, 26, 29])
def test_a_kill_changes_no_byte(kill_at, spoiled, whole, tmp_path, monkeypatch):
    """Before the spike, right after it, and with it in the window of the checkpoint."""
    step = Trainer.step

    def killed(self, batch):
        if self.done == kill_at:
            raise KeyboardInterrupt
        return step(self, batch)

    data, out = {"data": Artifact.read(spoiled)}, tmp_path / "train-killed"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Trainer, "step", killed)
        Train.read(SPEC).make(out, data, QUIET)
    assert Train.read(SPEC).make(out, data, QUIET).content == whole.content


def test_ranks_skip_the_same_steps(spoiled, whole, tmp_path):
    ended = together(2, made, SPEC | {"parallelism": {"data_parallel": "zero2"}}, str(spoiled), str(tmp_path / "two"))
    assert ended[0].result == ended[1].result
    ours, theirs = (read_jsonl(folder / "steps.jsonl") for folder in (tmp_path / "two", whole.folder))
    assert [row.get("skipped") for row in ours] == [row.get("skipped") for row in theirs]
    with pytest.raises(SpecError, match="skip_step does not work with data_parallel diloco"):
        Train.read(
            {
                **SPEC,
                "parallelism": {"data_parallel": {"kind": "diloco", "sync_every": 5}},
                "checkpoint": {"interval": 5},
            }
        )
