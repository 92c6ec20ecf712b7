"""The linears of a model in quantization-aware training: their weights are rounded in every pass, evaluations too."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hone.model.adapters.lora_linear import LoRALinear
from hone.model.adapters.lora_varied import VariedLoRALinear
from hone.model.adapters.wrap import Adapted
from hone.model.decoder import Decoder
from hone.model.devices.base import held_linears
from hone.model.linear import Dense
from hone.ops import swiglu
from hone.train.pipeline.stages import Elsewhere
from hone.train.quantization_aware.base import FakeQuantizer


class RoundedDense(Dense):
    """A `Dense` that multiplies by its weight as `quantizer` rounds it: what is trained is the weight before that, and what is saved."""

    quantizer: FakeQuantizer
    modules: Sequence[int]
    """Rows of each checkpoint module in the weight."""
    steps: tuple[Tensor, Tensor] | None = None
    """(first steps, logarithm of what they are times now), both [N, G], where steps are learned."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.quantizer.rounded_inputs(x), self.computed(), self.bias)

    def computed(self) -> Tensor:
        """The weight [N, K] of the product."""
        if self.steps is None:
            return self.quantizer.rounded(self.weight, self.modules)
        first, log = self.steps
        return self.quantizer.with_steps(self.weight, first * log.exp())  # type: ignore[attr-defined, no-any-return]


class RoundedSum(Adapted):
    """Base of linears with a LoRA adapter that multiply by the rounded sum Q(W + s B A): what a merge makes is then what was trained.

    Rounding the frozen weight alone would leave the factors' product outside of the grid, and a merge would round it anew.
    """

    quantizer: FakeQuantizer
    modules: Sequence[int]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.quantizer.rounded_inputs(x), self.computed(), self.bias)

    def of_gate_up(self, gate_up: Tensor) -> Tensor:
        """The same of swiglu(gate_up)."""
        return self(swiglu(gate_up))  # type: ignore[no-any-return]

    def computed(self) -> Tensor:
        """The weight [N, K] of the product."""
        return self.quantizer.rounded(self.dequantize(self.inner.weight.dtype), self.modules)


class RoundedLoRA(RoundedSum, LoRALinear):
    """A `LoRALinear` that multiplies by the rounded sum."""


class RoundedVariedLoRA(RoundedSum, VariedLoRALinear):
    """A `VariedLoRALinear` that multiplies by the rounded sum."""


_ADAPTED: dict[type, type] = {LoRALinear: RoundedLoRA, VariedLoRALinear: RoundedVariedLoRA}


class RoundedLinears:
    """Makes the layers' linears of `model` compute with weights that `quantizer` rounds; names, weights and gradients stay theirs."""

    def __init__(self, model: Decoder, quantizer: FakeQuantizer) -> None:
        self.quantizer = quantizer
        self.linears: list[RoundedDense | RoundedSum] = []
        for index, layer in enumerate(model.layers):
            if isinstance(layer, Elsewhere):
                continue
            described = model.config.linears(index)
            adapted = {path: layer.get_submodule(path) for path, one in described.items() if not one.precise}
            adapted = {path: one for path, one in adapted.items() if type(one) in _ADAPTED}
            for path, linear in {**held_linears(layer, described), **adapted}.items():
                # As `Fp8Linears` does, so that torch.compile sees a module like any other.
                linear.__class__ = _ADAPTED.get(type(linear), RoundedDense)
                linear.quantizer, linear.modules = quantizer, tuple(described[path].parts.values())
                self.linears.append(linear)

    def begin(self, weights: object, step: int) -> None:
        """Scales are found anew in every pass: nothing is due before the first of a step."""
