"""SwiGLU: a gated feed-forward."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from hone.base.table import Technique
from hone.model.linear import MakeLinear
from hone.ops import swiglu


class SwiGLU(Technique):
    """down(silu(gate(x)) * up(x)). Shazeer 2020, arXiv:2002.05202."""

    paper: ClassVar[str] = "arXiv:2002.05202"

    intermediate_size: int = Field(gt=0, description="Width between up and down.")
    bias: bool = Field(False, description="Biases on all three projections.")

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in) of its matrix products: fused gate and up, down."""
        return ((2 * self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size))

    def num_params(self, hidden_size: int) -> int:
        return sum(n_out * k_in + n_out * self.bias for n_out, k_in in self.matmuls(hidden_size))

    def build(self, hidden_size: int, name: str, make: MakeLinear) -> SwiGLULayer:
        """The module; `name` is its dotted path in the decoder."""
        return SwiGLULayer(self, hidden_size, name, make)


class SwiGLULayer(nn.Module):
    """The module behind `SwiGLU`. `forward(x [..., D]) -> [..., D]`."""

    pieces: ClassVar[dict[str, tuple[str, ...]]] = {"gate_up": ("gate", "up"), "down": ("down",)}
    residual: ClassVar[str] = "down"

    def __init__(self, spec: SwiGLU, hidden_size: int, name: str, make: MakeLinear) -> None:
        super().__init__()
        self.spec = spec
        self.rows = {"gate_up": [spec.intermediate_size] * 2, "down": [hidden_size]}
        self.gate_up = make(f"{name}.gate_up", hidden_size, 2 * spec.intermediate_size, spec.bias)
        self.down = make(f"{name}.down", spec.intermediate_size, hidden_size, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))
