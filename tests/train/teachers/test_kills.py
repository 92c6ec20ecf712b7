"""A distillation that is killed: on its own text, from its own average, with grids that it learns."""

from __future__ import annotations

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills


@pytest.mark.slow
def test_a_killed_on_policy_training_with_learned_steps_ends_with_the_same_bytes(data_folder, tmp_path):
    spec = {
        "model": SHAPE.model_copy(update={"num_layers": 1}).model_dump(),
        "objective": {
            "kind": "distill",
            "alpha": 0.5,
            "teacher": "moving_average",
            "text": {"kind": "student", "share": 0.5, "prompt_tokens": 8},
            "quantization_aware": {"kind": "lsq", "bits": 4, "group_size": 16},
        },
        "batch_size": 2,
        "seq_len": 16,
        "steps": 20,
        "checkpoint": {"interval": 3},
        "validation": {"sequences": 4},
    }
    expected = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(data_folder)}, Run(quiet=True))
    assert content_after_kills(spec, data_folder, tmp_path / "train-killed", (4, 11)) == expected.content
