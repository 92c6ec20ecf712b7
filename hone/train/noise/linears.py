"""Which linears of a model a training computes in another way than its dtype's: as codes of fp8, with a device's noise, or rounded."""

from __future__ import annotations

from typing import Protocol

from hone.model.decoder import Decoder
from hone.model.devices.run import NoisyLinears
from hone.train.fp8.linears import Fp8Linears
from hone.train.objectives.base import Objective
from hone.train.precision import FP8_RECIPES, Precision
from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.weights import Weights


class Linears(Protocol):
    """What the loop tells them."""

    def begin(self, weights: Weights, step: int) -> None:
        """Called before the first pass of each step; `step` counts those that are done."""


def linears_of(model: Decoder, precision: Precision, objective: Objective, *, holds: bool) -> Linears | None:
    """Makes the linears of `model` compute so, if they are to; `holds`: codes of fp8 stay for all micro-batches of a step."""
    if objective.simulated_device is not None:
        return NoisyLinears(model, objective.simulated_device)
    if objective.quantization_aware is not None:
        return RoundedLinears(model, objective.quantization_aware)
    return Fp8Linears(model, precision, holds=holds) if precision in FP8_RECIPES else None
