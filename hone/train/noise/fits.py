"""What a training with a simulated device's noise cannot be combined with."""

from __future__ import annotations

from typing import Any

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.devices.base import refuse
from hone.train.fp8.techniques import FP8


def check_noise(spec: Any, config: ModelConfig) -> None:
    """Raises SpecError where the fields of a train spec beside its objective's `simulated_device` leave no linears that it could change."""
    if spec.objective.simulated_device is None:
        return
    shared = spec.parallelism
    others = {
        f"precision {spec.precision}, whose products are of codes": ("precision: bf16", spec.precision in FP8),
        "compile, which would draw the same noise at each step": ("compile: false", spec.compile),
        "tensor parallelism, which divides what a device holds": (
            "parallelism.tensor_parallel_degree: 1",
            shared.tensor_parallel_degree > 1,
        ),
        "pipeline stages": ("parallelism.pipeline_parallel_degree: 1", shared.pipeline_parallel_degree > 1),
    }
    for what, (fix, given) in others.items():
        if given:
            raise SpecError(f"objective.simulated_device does not work with {what}", fix=f"set {fix}")
    refuse(config, False, "model")
