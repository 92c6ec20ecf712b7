"""Trainings with DPO's cache and with GRPO that are killed and go on end with the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.objectives.preference.pairs import write_pairs
from tests.train.rollouts.sums import write_sums

MODEL = SHAPE.model_copy(update={"num_layers": 2})
SPEC: dict[str, Any] = {"model": MODEL.model_dump(), "optimizer": {"lr": 3e-3}, "checkpoint": {"interval": 3}}
WRITTEN = {
    "kind": "grpo",
    "num_generations": 4,
    "max_completion_length": 3,
    "num_iterations": 2,
    "rewards": [{"kind": "pattern", "regex": "[ -~]*"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_a_killed_training_ends_with_the_same_bytes(kind, tmp_path):
    if kind == "grpo":
        data = write_sums(tmp_path / "data-sums")
        spec = {**SPEC, "batch_size": 1, "seq_len": 32, "steps": 14, "objective": WRITTEN}
    else:
        data = write_pairs(tmp_path / "data-pairs")
        objective = {"kind": "dpo", "precompute_ref_log_probs": True}
        spec = {**SPEC, "batch_size": 4, "seq_len": 64, "steps": 14, "objective": objective}
    if kind == "dpo":
        pytest.importorskip("numba")
        base = {**SPEC, "batch_size": 4, "seq_len": 64, "steps": 1, "objective": "simpo"}
        Train.read(base).make(tmp_path / "train-base", {"data": Artifact.read(data)}, Run(quiet=True))
    parents = {"teacher": tmp_path / "train-base"} if kind == "dpo" else {}
    named = {"data": Artifact.read(data), **{role: Artifact.read(folder) for role, folder in parents.items()}}
    whole = Train.read(spec).make(tmp_path / "train-whole", named, Run(quiet=True)).content
    assert content_after_kills(spec, data, tmp_path / "train-killed", [5, 9], parents=parents) == whole
