"""Mistakes in distributed training: each is one error on every rank that names it, and what was saved stays."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, MachineError
from hone.base.partial import BEGUN
from hone.base.run import Run
from hone.train.checkpoint import Checkpoints
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY, write_data
from tests.train.faults.fault_ranks import misused
from tests.train.ranks import made
from tests.train.test_ending import checkpoints_of

SPEC: dict[str, Any] = {
    "model": SHAPE.model_copy(update={"num_layers": 2}).model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 3,
    "validation": {"sequences": 4},
    "checkpoint": {"interval": 1},
    "optimizer": {"lr": 1e-3, **STEADY},
    "parallelism": {"data_parallel": "zero2"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data, and others beside it."""
    folder = tmp_path_factory.mktemp("made")
    write_data(folder / "data-other", seed=1)
    return write_data(folder / "data-small")


AT_START = [
    ("other spec", "rank 1 was started with train.optimizer.lr 0.002, rank 0 with 0.001"),
    ("other layout", "rank 1 was started with train.parallelism.data_parallel.kind zero1, rank 0 with zero2"),
    ("other version", "rank 1 was started with hone 0.0.9, rank 0 with"),
    ("other data", "rank 1 was started with input data "),
    ("data gone", "tokens/train.bin is missing"),
    ("other device", "local rank 1 has no GPU: torch sees 0"),
]


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("mistake", "said"),
    [pytest.param(*one, marks=[] if place < 2 else pytest.mark.slow) for place, one in enumerate(AT_START)],
    ids=[one[0] for one in AT_START],
)
def test_ranks_with_other_specs_end_before_anything_is_made(mistake, said, data, tmp_path):
    ended = together(2, misused, SPEC, str(data), str(tmp_path / "x"), mistake)
    assert all(one.returncode == 0 for one in ended), [one.stderr[-2000:] for one in ended]
    assert all(said in one.result and "\nfix: " in one.result for one in ended), ended
    assert not checkpoints_of(tmp_path / "x")


IN_A_STEP = [
    ("full disk", "the checkpoint step-00000002 could not be written on rank 1: OSError: [Errno 27] File too large"),
    ("folder gone", "the checkpoint step-00000002 could not be written on rank 0: FileNotFoundError: "),
    ("nan", "training diverged at step 1: loss nan"),
]


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("mistake", "said"),
    [pytest.param(*one, marks=[] if place == 0 else pytest.mark.slow) for place, one in enumerate(IN_A_STEP)],
    ids=[one[0] for one in IN_A_STEP],
)
def test_a_fault_of_one_rank_ends_all_and_loses_nothing(mistake, said, data, tmp_path):
    rank = 0 if mistake == "folder gone" else 1
    ended = together(2, misused, SPEC, str(data), str(tmp_path / "x"), mistake, rank)
    assert all(one.returncode == 0 for one in ended), [one.stderr[-2000:] for one in ended]
    assert all(one.result.startswith(said) and "\nfix: " in one.result for one in ended), ended
    if mistake != "nan":
        assert "step-00000001" in checkpoints_of(tmp_path / "x")
        again = [one.result for one in together(2, made, SPEC, str(data), str(tmp_path / "x"))]
        whole = [one.result for one in together(2, made, SPEC, str(data), str(tmp_path / "whole"))]
        assert again == whole


def test_two_trainings_into_one_folder(data, tmp_path):
    partial = tmp_path / "x.partial"
    partial.mkdir()
    with open(partial / BEGUN, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ArtifactError, match="another process is making"):
            Train.read(SPEC).make(tmp_path / "x", {"data": Artifact.read(data)}, Run(quiet=True))


def test_a_folder_of_checkpoints_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(MachineError, match="could not be written on rank 0: NotADirectoryError") as caught:
        Checkpoints(tmp_path / "taken" / "checkpoints")
    assert "may be written and has room" in caught.value.fix
