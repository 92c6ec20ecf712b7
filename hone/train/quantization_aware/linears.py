"""The linears of a model in quantization-aware training: their weights are rounded in every pass, evaluations too."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Decoder
from hone.model.devices.base import held_linears
from hone.model.linear import Dense
from hone.train.pipeline.stages import Elsewhere
from hone.train.quantization_aware.base import FakeQuantizer


class RoundedDense(Dense):
    """A `Dense` that multiplies by its weight as `quantizer` rounds it: what is trained is the weight before that, and what is saved."""

    quantizer: FakeQuantizer
    modules: Sequence[int]
    """Rows of each checkpoint module in the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.quantizer.rounded_inputs(x), self.computed(), self.bias)

    def computed(self) -> Tensor:
        """The weight [N, K] of the product."""
        return self.quantizer.rounded(self.weight, self.modules)


class RoundedLinears:
    """Makes the layers' linears of `model` compute with weights that `quantizer` rounds; names, weights and gradients stay theirs."""

    def __init__(self, model: Decoder, quantizer: FakeQuantizer) -> None:
        self.linears: list[RoundedDense] = []
        for index, layer in enumerate(model.layers):
            if isinstance(layer, Elsewhere):
                continue
            described = model.config.linears(index)
            for path, linear in held_linears(layer, described).items():
                linear.__class__ = (
                    RoundedDense  # as `Fp8Linears` does, so that torch.compile sees a module like any other
                )
                linear.quantizer, linear.modules = quantizer, tuple(described[path].parts.values())
                self.linears.append(linear)

    def begin(self, weights: object, step: int) -> None:
        """Scales are found anew in every pass: nothing is due before the first of a step."""
