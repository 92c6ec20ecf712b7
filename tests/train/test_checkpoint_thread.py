"""Checkpoints written by a thread: the same ones, whole or missing after a kill, and a clear error when the disk fails."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import HoneError, MachineError
from hone.base.plan import facts_of
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.measure.machine import describe
from hone.model.hf import load
from hone.train.checkpoint import Checkpoints
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY, content_after_kills
from tests.train.ranks import made
from tests.waiting import wait_until

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 9,
    "validation": {"sequences": 7},
    "checkpoint": {"interval": 2, "async_mode": "async"},
    "optimizer": {"lr": 1e-3, **STEADY},
}


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Gate:
    """Stands for `save_tensors` with a disk that waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import hone.model.shards

        self._write, self.open, self.began = hone.model.shards.save_tensors, threading.Event(), threading.Event()
        monkeypatch.setattr(hone.model.shards, "save_tensors", self)

    def __call__(self, *arguments: Any) -> None:
        self.began.set()
        assert self.open.wait(100)
        self._write(*arguments)


def test_an_asynchronous_checkpoint_has_the_state_of_its_step(monkeypatch, tmp_path):
    gate, weights = Gate(monkeypatch), {"weight.a": torch.arange(8.0)}
    checkpoints = Checkpoints(tmp_path, keep=1, background=True)
    checkpoints.save(3, weights, {"done": 3})
    assert gate.began.wait(100)
    weights["weight.a"].fill_(-1.0)  # the training goes on
    assert checkpoints.newest() is None and steps_in(tmp_path) == ["step-00000003.partial"]
    gate.open.set()
    wait_until(lambda: steps_in(tmp_path) == ["step-00000003"])  # without a further call
    assert [path.name for path in (tmp_path / "step-00000003").iterdir() if "written" in path.name] == []
    stored, numbers = checkpoints.newest()
    assert torch.equal(stored.whole("weight.a"), torch.arange(8.0)) and numbers == {"done": 3}
    checkpoints.save(4, weights, {"done": 4})
    checkpoints.save(5, {"weight.a": torch.zeros(8)}, {"done": 5})  # waits for the one before
    checkpoints.finish()  # before it, another reader might find step 4, which goes when 5 is there
    stored, numbers = Checkpoints(tmp_path).newest()
    assert torch.equal(stored.whole("weight.a"), torch.zeros(8)) and numbers == {"done": 5}
    checkpoints.close()
    assert steps_in(tmp_path) == ["step-00000005"]


def test_a_failed_write_ends_training_and_keeps_the_last_checkpoint(monkeypatch, tmp_path):
    import hone.model.shards

    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(1, {"weight.a": torch.ones(3)}, {"done": 1})
    checkpoints.finish()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hone.model.shards, "save_tensors", full)
    checkpoints.save(2, {"weight.a": torch.ones(3)}, {"done": 2})
    with pytest.raises(
        MachineError, match=r"step-00000002 could not be written .* rank 0: OSError.* No space"
    ) as caught:
        checkpoints.save(3, {"weight.a": torch.ones(3)}, {"done": 3})
    assert "checkpoint.async_mode" in caught.value.fix
    assert checkpoints.newest()[1] == {"done": 1}
    checkpoints.finish()  # the error was raised, nothing waits


@pytest.mark.slow
def test_a_training_killed_at_any_time_ends_as_one_that_was_not(data_folder, tmp_path):
    parents = {"data": Artifact.read(data_folder)}
    whole = Train.read({**SPEC, "checkpoint": {"interval": 2}}).make(tmp_path / "whole", parents, Run(quiet=True))
    assert content_after_kills(SPEC, data_folder, tmp_path / "killed", [5]) == whole.content


def failing_on_one(folder: str) -> str:
    """The error of this rank when rank 1 cannot write its part."""
    import hone.model.shards

    mesh = Mesh.from_environment()
    checkpoints = Checkpoints(Path(folder), mesh=mesh, background=True)
    try:
        with mesh.together():
            for step in (1, 2):
                if (step, mesh.rank) == (2, 1):
                    hone.model.shards.save_tensors = None  # type: ignore[assignment]
                checkpoints.save(step, {f"weight.{mesh.rank}": torch.full((4,), float(step))}, {"done": step})
            checkpoints.finish()
    except HoneError as error:
        return str(error)
    return "nothing"


def test_ranks_publish_together_and_end_together(data_folder, tmp_path):
    errors = [one.result for one in together(2, failing_on_one, str(tmp_path / "kept"))]
    assert all("step-00000002 could not be written in the background on rank 1: TypeError" in one for one in errors)
    stored, numbers = Checkpoints(tmp_path / "kept").newest()
    assert numbers == {"done": 1} and {*stored.labels} == {"weight.0", "weight.1"}

    short = {**SPEC, "steps": 6}
    one = Train.read(short).make(tmp_path / "one", {"data": Artifact.read(data_folder)}, Run(quiet=True))
    spec = {**short, "parallelism": {"data_parallel": "zero3"}}
    ended = together(2, made, spec, str(data_folder), str(tmp_path / "two"), 5)
    assert ended[1].returncode == -signal.SIGKILL and "the stage resumes" in ended[0].result
    kept = steps_in(next(tmp_path.glob("two.partial")).joinpath("state", "checkpoints"))
    assert "step-00000002" in kept, kept
    again = together(2, made, spec, str(data_folder), str(tmp_path / "two"))
    assert again[0].returncode == 0 and again[0].result == again[1].result
    ours, theirs = load(tmp_path / "two").state_dict(), load(one.folder).state_dict()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)


def test_the_plan_counts_the_copy(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    estimates = [
        Train.read({**SPEC, "checkpoint": {"interval": 2, "async_mode": mode}}).plan(facts, describe("cpu")).estimates
        for mode in ("async", "disabled")
    ]
    growth = [one["memory_growth_bytes"].value for one in estimates]
    params = estimates[0]["num_params"].value
    assert growth[0] - growth[1] == pytest.approx(12 * params)
