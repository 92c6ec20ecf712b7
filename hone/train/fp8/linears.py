"""The linears of a model in fp8 training: their forward pass, and the codes of their weights while a step holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.base.errors import MachineError
from hone.model.decoder import Decoder
from hone.model.linear import Dense, Experts
from hone.ops.dispatch import runs_kernel, say_once
from hone.ops.fp8.api import fp8_trained_linear
from hone.ops.fp8.experts import fp8_grouped_linear
from hone.ops.fp8.factors import WeightCodes, weight_codes
from hone.parallel.pipeline.weight_gradients import WeightGradients
from hone.train.fp8.deferred import DeferredForward
from hone.train.fp8.fits import in_fp8
from hone.train.pipeline.stages import Elsewhere
from hone.train.precision import FP8_RECIPES, Precision
from hone.train.weights import Weights


class Fp8Dense(Dense):
    """A `Dense` whose products are of fp8 codes wherever gradients are wanted.

    Without gradients, so in evaluations, it is the dense layer that is saved and served. Weights, their names and dtypes are
    those of `Dense`: neither checkpoints nor saved models know of fp8.
    """

    recipe: str
    held: WeightCodes | None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        return fp8_trained_linear(x, self.weight, self.bias, recipe=self.recipe, held=self.held)

    def deferring(self, queue: WeightGradients) -> DeferredForward:
        """As `WeightGradients.defer` asks."""
        return DeferredForward(self, queue)


class Fp8Experts(Experts):
    """An `Experts` as `Fp8Dense` is a `Dense`."""

    recipe: str
    held: WeightCodes | None

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().product(x, ends)
        return fp8_grouped_linear(x, self.weight, ends, recipe=self.recipe, held=self.held)


class Fp8Linears:
    """Makes the linears of `model` compute in fp8 by the recipe of `precision`: of a rank's part, with what scales its numbers have.

    With `holds` a weight is cast once a step, by `begin`, and its codes, 2 bytes a weight, stay for all micro-batches.
    Otherwise each pass casts the weights that it reads. Raises MachineError on a GPU without fp8 products.
    """

    def __init__(self, model: Decoder, precision: Precision, *, holds: bool) -> None:
        device = next(model.parameters()).device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise MachineError(
                f"{torch.cuda.get_device_name(device)} has no fp8 products (compute capability 8.9 and later have)",
                fix="set precision: bf16",
            )
        self.recipe, self.holds = FP8_RECIPES[precision], holds
        self.linears: list[Fp8Dense | Fp8Experts] = []
        grouped = device.type != "cuda" or runs_kernel("fp8_grouped_linear", device)
        for index, layer in enumerate(model.layers):
            if isinstance(layer, Elsewhere):
                continue
            for path in in_fp8(model.config, index, precision):
                found: Any = layer.get_submodule(path)
                if type(found) not in IN_FP8 or not found.weight.requires_grad:
                    continue
                if type(found) is Experts and not grouped:
                    say_once(
                        "experts compute in bf16: products of several experts' fp8 codes are made for Hopper alone"
                    )
                    continue
                # Its class, not its `forward`, so that torch.compile sees a module like any other.
                found.__class__ = IN_FP8[type(found)]
                found.recipe, found.held = self.recipe, None
                self.linears.append(found)

    @torch.no_grad()
    def begin(self, weights: Weights, step: int) -> None:
        """To be called before a step's first pass, with the model's `weights`: casts them, if it holds them."""
        if not self.holds:
            return
        weights.ready()
        for linear in self.linears:
            linear.held = None  # frees the codes of the step before
            linear.held = weight_codes(linear.weight, self.recipe)


IN_FP8: dict[type, type[Fp8Dense | Fp8Experts]] = {Dense: Fp8Dense, Experts: Fp8Experts}
"""What a linear becomes."""
