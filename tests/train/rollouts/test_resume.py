"""Trainings with DPO's cache and with GRPO that are killed and go on end with the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.run import Run
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.objectives.preference.pairs import write_answers, write_pairs
from tests.train.ranks import made
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "kto"])
def test_two_ranks_share_the_answers(kind, tmp_path):
    if kind == "grpo":
        data, objective, seq_len = write_sums(tmp_path / "data-sums"), {**WRITTEN, "num_iterations": 1}, 32
    else:
        pytest.importorskip("numba")
        data, objective, seq_len = write_answers(tmp_path / "data-answers"), "kto", 64
    spec = {
        **SPEC,
        "batch_size": 2,
        "seq_len": seq_len,
        "steps": 3,
        "objective": objective,
        "validation": {"interval": 3},
    }
    teacher = None
    if kind == "kto":
        base = {**SPEC, "batch_size": 4, "seq_len": 64, "steps": 1, "objective": "simpo"}
        pairs = write_pairs(tmp_path / "data-pairs")
        teacher = Train.read(base).make(tmp_path / "train-base", {"data": Artifact.read(pairs)}, Run(quiet=True)).folder
    out = tmp_path / "train-ranks"
    ended = together(2, _ranked, spec, str(data), str(out), {"teacher": str(teacher)} if teacher else {})
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr[-2000:] for one in ended)
    rows = [row for row in read_jsonl(out / "steps.jsonl") if "loss" in row]
    assert len(rows) == 3
    if kind == "grpo":
        assert all(row["positions"] >= 4 * seq_len and 0 <= row["reward"] <= 1 for row in rows)
    else:
        alone = Train.read(spec).make(
            tmp_path / "train-alone", {"data": Artifact.read(data), "teacher": Artifact.read(teacher)}, Run(quiet=True)
        )
        first = next(row for row in read_jsonl(alone.folder / "steps.jsonl") if "loss" in row)
        assert rows[0]["loss"] == pytest.approx(first["loss"], rel=0.05), (
            "z is of other neighbours, the losses are the same sum"
        )


def _ranked(spec: dict[str, Any], data: str, out: str, others: dict[str, str]) -> str:
    return made(spec, data, out, **others)
