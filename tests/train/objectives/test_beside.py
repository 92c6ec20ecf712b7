"""Tensors that are trained beside a model: on several ranks, and in steps that are computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.ranks import Mesh
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.checkpoint import Checkpoints
from hone.train.faults.checks import Checks
from hone.train.faults.rerun import Rerun
from hone.train.loop import Trainer
from hone.train.parallelism import Parallelism
from hone.train.passes import Batch
from hone.train.schedules.cosine import Cosine
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import on_ranks

VOCAB = 61


def trainer(mesh: Mesh) -> Trainer:
    """A student of width 48, whose hidden states a matrix brings to the teacher's 64, in int4 with learned steps."""
    sizes = {"num_layers": 1, "max_seq_len": 32}
    model = build(SHAPE.model_copy(update=sizes).config(VOCAB), seed=1)
    teacher = build(SHAPE.model_copy(update={**sizes, "hidden_size": 64}).config(VOCAB), seed=2)
    rounding = {"kind": "lsq", "bits": 4, "group_size": 16}
    objective = OBJECTIVES.read({"kind": "hidden_states", "quantization_aware": rounding})
    ranks = Parallelism().ranks(mesh, "cpu")
    return Trainer(model, steps=4, schedule=Cosine(warmup=0), objective=objective, teacher=teacher, ranks=ranks)


def alone(objective: dict[str, Any]) -> Trainer:
    model = build(SHAPE.model_copy(update={"num_layers": 1, "max_seq_len": 32}).config(VOCAB), seed=0)
    return Trainer(model, steps=4, schedule=Cosine(warmup=0), objective=OBJECTIVES.read(objective))


def part(rank: int, step: int) -> Batch:
    """The sequences of a rank in a step."""
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(10 * step + rank)).numpy()
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), torch.zeros(2, 16).int().numpy())


def resumed(folder: str) -> list[bool]:
    """Whether each matrix and step is the same after two steps as after one, a checkpoint, and another of a new trainer."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    one, checkpoints = trainer(mesh), Checkpoints(Path(folder), keep=1, mesh=mesh)
    one.step(part(mesh.rank, 0))
    one.save(checkpoints)
    checkpoints.finish()
    again, found = trainer(mesh), checkpoints.newest()
    assert found is not None
    again.restore(*found)
    for each in (one, again):
        each.step(part(mesh.rank, 1))
    mine, others = one.tutor.state(), again.tutor.state()
    assert mine.keys() == others.keys() and any("projection" in name for name in mine)
    return [torch.equal(mine[name], others[name]) for name in mine]


def test_passes_that_are_only_compared_teach_nothing():
    """With steps computed again: the matrices and steps, and a second student, are as without."""
    peer = {"kind": "distill", "alpha": 0.5, "teacher": "peer"}
    for make in (trainer, lambda mesh: alone(peer)):
        plain, checked = make(Mesh()), make(Mesh())
        checked.rerun = Rerun(Checks(rerun_interval=1), pytest.fail)
        for step in range(2):
            checked.rerun.read = lambda index, step=step: part(0, step)
            assert plain.step(part(0, step)).loss == pytest.approx(checked.step(part(0, step)).loss, rel=1e-5)
        theirs = checked.tutor.state()
        for name, one in plain.tutor.state().items():
            torch.testing.assert_close(theirs[name], one, rtol=1e-3, atol=1e-5, msg=name)


def test_two_ranks_go_on_with_what_is_trained_beside_the_model(tmp_path):
    for found in on_ranks(2, resumed, str(tmp_path)):
        assert all(found)
