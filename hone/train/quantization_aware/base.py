"""The base of fake quantizers: the rounding of a linear's weight and inputs in training, differentiable by straight-through estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

Inputs = Literal[
    "none",
    "int8_token",
    "int8_token_asymmetric",
    "int4_token",
    "int4_token_asymmetric",
    "fp8_token",
    "fp8_group",
    "mxfp4",
    "mxfp8",
]


class FakeQuantizer(Technique):
    """Rounds weights to the grid of a quantizer and back, with scales found anew in each forward pass.

    Weights stay floats and are saved as they are: the quantizer `exported` then stores exactly what the last pass multiplied with.
    Rounding has slope one, the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432).
    """

    learns_steps: ClassVar[bool] = False
    """Whether its scales are trained (`hone.train.quantization_aware.steps`)."""

    activations: Inputs = Field(
        "none",
        description="Rounding of the linears' inputs, too, as quantizers name it: of those with scales found at run time.",
    )

    @property
    def exported(self) -> dict[str, Any]:
        """The step of a compress stage that stores what the forward pass computed with."""
        given = {} if self.activations == "none" else {"activations": self.activations}
        return {"kind": self.kind, **given}

    def problem(self, columns: int, modules: Sequence[int]) -> str | None:
        """What of a weight of `columns` input features, a stack of checkpoint modules of so many rows, it cannot round; None: nothing."""
        return None

    def rounded(self, weight: Tensor, modules: Sequence[int]) -> Tensor:
        """A weight [N, K], a stack of checkpoint modules of so many rows, as it is dequantized; differentiable in `weight`, of its dtype."""
        raise NotImplementedError

    def rounded_inputs(self, x: Tensor) -> Tensor:
        """Inputs [..., K] as the product of codes has them; differentiable in `x`."""
        if self.activations == "none":
            return x
        from hone.ops.rounding.inputs import ACTIVATIONS, round_inputs
        from hone.ops.rounding.straight_through import straight_through

        values, scales = round_inputs(x.detach(), ACTIVATIONS[self.activations], {})
        rounded = values if scales is None else (values.to(scales.dtype) * scales).to(x.dtype)
        return straight_through(x, rounded)
