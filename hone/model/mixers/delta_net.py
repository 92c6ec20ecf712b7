"""DeltaNet: a linear-attention state that is corrected, key by key, instead of only added to."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hone.model.context import Context
from hone.model.linear import MakeLinear
from hone.model.mixer import Initial
from hone.model.mixers.gated_linear import initial_rates, initial_steps, wide
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer
from hone.model.norm import RMSNorm
from hone.ops import scan_delta


class DeltaNet(Recurrent):
    """The delta rule in parallel: S_t = a_t (1 - b_t k_t^T k_t) S_(t-1) + b_t k_t^T v_t. Yang et al. 2024, arXiv:2406.06484.

    Keys of length 1, b_t = sigmoid of the token: 1 replaces what the state said of a key, 0 leaves it. With `gated` the state
    also fades by Mamba-2's scalar a_t (Gated DeltaNet, arXiv:2412.06464). Runs in plain torch, also on a GPU.
    """

    paper: ClassVar[str] = "arXiv:2406.06484"

    value_head_dim: int | None = Field(None, gt=0, le=256, description="Width of a head's values. Default: head_dim.")
    gated: bool = Field(True, description="Whether the state also fades, by a number a head that each token decides.")

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_head_dim or self.head_dim

    def rows(self) -> list[int]:
        """Rows of the fused input projection: q, k, v, output gate, b, and what the fading is made of."""
        keys, values = (self.num_heads * size for size in self.state_shape)
        return [keys, keys, values, values, self.num_heads, *[self.num_heads] * self.gated]

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in) of its matrix products: fused input, out."""
        return ((sum(self.rows()), hidden_size), (hidden_size, self.num_heads * self.state_shape[1]))

    def num_params(self, hidden_size: int) -> int:
        weights = super().num_params(hidden_size)
        return weights + self.state_shape[1] + 2 * self.num_heads * self.gated

    def mixing_flops(self, seq_len: int) -> float:
        """The recurrence, and what the state says of a key before it is corrected."""
        rows, columns = self.state_shape
        return super().mixing_flops(seq_len) + 2.0 * self.num_heads * rows * columns

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> DeltaNetLayer:
        return DeltaNetLayer(self, hidden_size, layer, name, norm_eps, make)


class DeltaNetLayer(RecurrentLayer):
    """The module behind `DeltaNet`. Between passes it keeps the state."""

    residual: ClassVar[str] = "out"

    def __init__(
        self, spec: DeltaNet, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.pieces = {"qkvg": ("q", "k", "v", "gate", "beta", *["decay"] * spec.gated), "out": ("out",)}
        self.rows = {"qkvg": spec.rows(), "out": [hidden_size]}
        self.qkvg = make(f"{name}.qkvg", hidden_size, sum(spec.rows()), False)
        self.out = make(f"{name}.out", spec.num_heads * spec.state_shape[1], hidden_size, False)
        self.head_norm = RMSNorm(spec.state_shape[1], norm_eps)
        self.initial: dict[str, Initial] = {}
        if spec.gated:
            self.log_rate = nn.Parameter(torch.empty(spec.num_heads))
            self.step_bias = nn.Parameter(torch.empty(spec.num_heads))
            self.initial = {"log_rate": initial_rates, "step_bias": initial_steps}

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        q, k, v, gate, beta, *low = self.qkvg(x).split(self.rows["qkvg"], -1)
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (F.silu(q), F.silu(k), v))
        decay = None
        if spec.gated:
            decay = -F.softplus(wide(low[0]) + wide(self.step_bias)) * wide(self.log_rate).exp()
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        mixed, state = scan_delta(q, k, v, beta.sigmoid(), decay, state=known, reset=begins, return_state=True)
        return self.out(F.silu(gate) * self.head_norm(mixed).flatten(-2)), state
