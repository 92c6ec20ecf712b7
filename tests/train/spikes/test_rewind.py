"""Rewind: a training goes back from a spike and leaves out the batches since, on all ranks, and ends alike after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import HoneError, SpecError
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.model.hf import load
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from hone.train.spikes.rewind import Rewind
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import write_data
from tests.train.ranks import made
from tests.train.spikes.test_spikes import SPEC as SKIPS

REWIND = {"rolling_interval_length": 10, "sigma_factor": 6.0, "steps": 5, "leave_out": 2}
SPEC: dict[str, Any] = {
    **SKIPS,
    "checkpoint": {"interval": 5},
    "max_grad_norm": 1.0,
    "optimizer": {**SKIPS["optimizer"], "lr": 1e-3, "skip_step": None, "rewind": REWIND},
}
QUIET = Run(quiet=True)
TO, LEFT_OUT = 20, 8
"""The spike is in step 26: back to 20, without batches 21 to 28."""


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """More of the usual data, of which the sequences of the 26th step are noise."""
    folder = write_data(tmp_path_factory.mktemp("made") / "data-spoiled", num_documents=320)
    data = PackedTokens(folder)
    order = data.order(0, 0, data.num_sequences(32))
    assert len(order) > 4 * (32 + LEFT_OUT)
    tokens = np.memmap(folder / "tokens" / "train.bin", "<u2", mode="r+")
    for place in order[100:104]:
        tokens[place * 32 : place * 32 + 32] = np.random.default_rng(1).integers(100, 250, 32)
    tokens.flush()
    return folder


@pytest.fixture(scope="module")
def whole(spoiled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("line") / "train-whole"
    return Train.read(SPEC).make(folder, {"data": Artifact.read(spoiled)}, QUIET)


def test_it_is_the_training_that_never_saw_the_batches(whole, spoiled):
    """To the bit, by a loop of its own: 20 steps, and the others on the batches after those that were left out."""
    rows = read_jsonl(whole.folder / "steps.jsonl")
    (found,) = (row for row in rows if "rewound" in row)
    assert found["step"] == TO + 1 and found["rewound"].pop("why").startswith("loss ")
    assert found["rewound"] == {"from": 26, "to": TO, "first_left_out": 21, "last_left_out": 28}
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 33)) and not any("skipped" in row for row in steps)
    figure = whole.figures["rewinds"]
    assert figure.value == 1 and figure.note.startswith("from 26 to 20 (batches 21 to 28 left out)")

    data, spec = PackedTokens(spoiled), Train.read(SPEC)
    from hone.model.decoder import build

    config = spec.model.config(data.vocab_size, eos=data.eos_token_id)
    trainer = Trainer(build(config, seed=0), steps=32, schedule=Cosine(kind="cosine"), optimizer=spec.optimizer)
    for step in range(32):
        made = trainer.step(data.batch(step if step < TO else step + LEFT_OUT, 4, 32, 0))
        assert made.row() == steps[step]
    ours = load(whole.folder).state_dict()
    assert all(torch.equal(ours[name], one) for name, one in trainer.model.state_dict().items())


def test_the_next_training_reads_on_after_what_was_left_out(whole):
    import json

    place = json.loads((whole.folder / "position.json").read_text())
    assert place["steps"] == 32 and place["sequences"] == 4 * (32 + LEFT_OUT)
    assert list(place["sources"].values()) == [4 * (32 + LEFT_OUT)]
    assert whole.figures["epochs"].note.startswith(f"{4 * (32 + LEFT_OUT)} sequences read")
    assert place["tokens"] == read_jsonl(whole.folder / "steps.jsonl")[-2]["tokens"]


@pytest.mark.parametrize(
    ("kill_at", "interval"),
    [
        ((22, 20, 29), 5),
        *(
            pytest.param(kill_at, interval, marks=pytest.mark.slow)
            for kill_at in [(23,), (25, 20), (22, 20, 29), (31,)]
            for interval in (5, 1)
            if (kill_at, interval) != ((22, 20, 29), 5)
        ),
    ],
)
def test_a_kill_changes_no_byte(kill_at, interval, spoiled, whole, tmp_path, monkeypatch):
    """Killed when as many steps are done, one after the other: before the spike, in it, right after it and later."""
    spec = Train.read({**SPEC, "checkpoint": {"interval": interval}})
    data, out = {"data": Artifact.read(spoiled)}, tmp_path / "train-killed"
    step = Trainer.step
    for number, place in enumerate(kill_at):

        def killed(self, batch, place=place, again=number > 0):
            if self.done == place and (self.rewound.count > 0) == (again or place > 26):
                raise KeyboardInterrupt
            return step(self, batch)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trainer, "step", killed)
            spec.make(out, data, QUIET)
    assert spec.make(out, data, QUIET).content == whole.content


def test_ranks_go_back_together_and_resume_as_others(spoiled, whole, tmp_path):
    """Killed after the rewind under zero3 on two ranks, and ended under zero1 on four."""
    out = tmp_path / "ranks"
    spec = {**SPEC, "checkpoint": {"interval": 5}, "parallelism": {"data_parallel": "zero3"}}
    ended = together(2, made, spec, str(spoiled), str(out), 27)
    assert "rank 0 lost" in ended[0].result
    again = together(4, made, {**spec, "parallelism": {"data_parallel": "zero1"}}, str(spoiled), str(out))
    assert len({one.result for one in again}) == 1 and again[0].returncode == 0
    ours, theirs = (read_jsonl(folder / "steps.jsonl") for folder in (out, whole.folder))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert [row["rewound"]["to"] for row in ours if "rewound" in row] == [TO]
    weights, others = load(out).state_dict(), load(whole.folder).state_dict()
    assert all((weights[name] - others[name]).abs().max() < 1e-4 for name in others)


def test_it_never_goes_back_further_than_before_and_gives_up(spoiled, tmp_path, monkeypatch):
    """A spike in every step 13 that is tried, and one after a rewind to a state that is the first one left."""
    from hone.train.spikes import skip_step

    judge, tried = skip_step.Spikes.judge, []

    def spiky(self, loss, norm):
        tried.append(loss)
        return "a spike" if len(tried) >= 13 else judge(self, loss, norm)

    monkeypatch.setattr(skip_step.Spikes, "judge", spiky)
    optimizer = {**SPEC["optimizer"], "rewind": {**REWIND, "max_rewinds": 2}}
    with pytest.raises(HoneError, match="diverged at step 6 after 2 rewinds: a spike"):
        Train.read({**SPEC, "optimizer": optimizer}).make(tmp_path / "x", {"data": Artifact.read(spoiled)}, QUIET)
    assert len(tried) == 15
    rows = read_jsonl(tmp_path / "x.partial" / "steps.jsonl")
    assert [row["rewound"]["from"] for row in rows if "rewound" in row] == [13, 6]
    assert [row["step"] for row in rows if "rewound" in row] == [6, 6]


def test_what_does_not_go_together_is_refused(spoiled):
    wrong = [
        ({"checkpoint": {"interval": 3}}, "optimizer.rewind.steps 5 is no multiple of checkpoint.interval 3"),
        ({"checkpoint": {"interval": 0}}, "no multiple of checkpoint.interval 0"),
        (
            {"checkpoint": {"interval": 5, "keep": {"best": True, "interval": 5}}},
            "checkpoint.keep.best does not work with",
        ),
        ({"optimizer": {**SPEC["optimizer"], "skip_step": True}}, "skip_step and rewind are two answers"),
        (
            {"parallelism": {"data_parallel": {"kind": "diloco", "sync_every": 5}}},
            "rewind does not work with data_parallel diloco",
        ),
    ]
    for changes, said in wrong:
        with pytest.raises(SpecError, match=said):
            Train.read({**SPEC, **changes})


def test_the_step_to_go_back_to_depends_on_the_spike_alone():
    rewind = Rewind(steps=100)
    found = [rewind.target(step, 0) for step in (1, 100, 199, 200, 299, 300, 399, 400)]
    assert found == [0, 0, 0, 100, 100, 200, 200, 300] and rewind.target(450, 400) == 400


def test_the_plan_counts_the_checkpoints_to_go_back_to(spoiled: Path):
    from hone.base.plan import facts_of
    from hone.measure.machine import describe

    facts, machine = {"data": facts_of(Artifact.read(spoiled))}, describe("cpu")
    most = [Train.read(spec).plan(facts, machine).estimates["checkpoint_bytes"].value for spec in (SPEC, SKIPS)]
    assert most[0] > most[1]
