"""What a training with a simulated device's noise cannot be combined with is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hone.base.errors import SpecError
from hone.train.noise.fits import check_noise
from hone.train.stage import Train

MOE = {"kind": "moe", "num_experts": 4, "intermediate_size": 32}
NOISE = {"objective": {"kind": "next_token", "simulated_device": {"kind": "analog"}}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"precision": "fp8"}, "precision fp8"),
        ({"compile": True}, "compile"),
        ({"parallelism": {"tensor_parallel_degree": 2}}, "tensor parallelism"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "pipeline stages"),
        ({"model": {"feed_forward": [MOE]}}, "4 experts"),
    ],
)
def test_what_noise_does_not_work_with(more: dict[str, Any], said: str) -> None:
    spec = Train.read({**NOISE, **more})
    config = spec.model.config(vocab_size=256)
    with pytest.raises(SpecError, match=said):
        check_noise(spec, config)
    check_noise(Train.read(more), config)  # without a device nothing is refused


def test_a_plain_training_is_not_refused() -> None:
    spec = Train.read(NOISE)
    check_noise(spec, spec.model.config(vocab_size=256))
