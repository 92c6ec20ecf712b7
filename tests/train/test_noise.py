"""A training with a device's noise: what it changes, that it resumes alike, and what it is refused with."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.train.stage import Train
from tests.train.conftest import SHAPE

SPEC = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 6}
ANALOG = {"objective": {"kind": "next_token", "simulated_device": {"kind": "analog"}}}


def train(folder, data, **fields):
    return Train.read({**SPEC, **fields}).make(folder, {"data": Artifact.read(data)}, Run(quiet=True))


def weights(folder) -> dict:
    return load_file(folder / "model.safetensors")


def test_noise_changes_the_training_and_is_the_seed_s(data_folder, tmp_path):
    made = {
        name: weights(train(tmp_path / f"train-{name}", data_folder, **fields).folder)
        for name, fields in {"plain": {}, "noisy": ANALOG, "again": ANALOG}.items()
    }
    name = next(key for key in made["plain"] if key.endswith("down_proj.weight"))
    assert (made["noisy"][name] == made["again"][name]).all()
    assert (made["noisy"][name] != made["plain"][name]).any()


def test_micro_batches_compute_with_one_noise(data_folder, tmp_path):
    whole = weights(train(tmp_path / "train-whole", data_folder, **ANALOG).folder)
    parts = weights(train(tmp_path / "train-parts", data_folder, **ANALOG, gradient_accumulation_steps=2).folder)
    plain = weights(train(tmp_path / "train-plain", data_folder).folder)
    for name, one in whole.items():
        # Of a gradient near zero AdamW's step has the sign of its rounding: single weights may part, means do not.
        assert abs(one - parts[name]).mean() < 0.1 * abs(one - plain[name]).mean(), name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "fp8"}, "precision fp8"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_noise_does_not_work_with(data_folder, tmp_path, fields, said):
    with pytest.raises(SpecError, match=said) as error:
        train(tmp_path / "train-refused", data_folder, **ANALOG, **fields)
    assert "objective.simulated_device" in str(error.value) and error.value.fix.startswith("set ")
