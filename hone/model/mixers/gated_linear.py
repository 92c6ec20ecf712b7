"""Gated linear attention: what a token says decides how much of the state is forgotten."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hone.model.context import Context
from hone.model.linear import MakeLinear
from hone.model.mixer import Initial
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer
from hone.model.norm import RMSNorm
from hone.ops import scan


class GatedLinear(Recurrent):
    """Linear attention with learned forgetting: S_t = diag(a_t) S_(t-1) + k_t^T v_t. Yang et al. 2023, arXiv:2312.06635.

    gate `channel`: a_t = sigmoid(x W1 W2 + b)^(1/16), a number a key channel, W1 of low rank. gate `head`: the scalar of
    Mamba-2 (arXiv:2405.21060), a_t = exp(-dt_t A) with keys scaled by dt_t = softplus(x w + b), a number a head; cheaper
    on a GPU. Heads are normalised and gated before the output projection.
    """

    paper: ClassVar[str] = "arXiv:2312.06635"

    value_head_dim: int | None = Field(
        None, gt=0, le=256, description="Width of a head's values. Default: twice head_dim."
    )
    gate: Literal["channel", "head"] = Field("channel", description="Forgetting a key channel, or a head (Mamba-2).")
    gate_rank: int = Field(16, gt=0, description="Rank of the channel gate's projection.")
    gate_root: float = Field(16.0, ge=1, description="The channel gate is this root of a sigmoid: 16 forgets slowly.")

    @model_validator(mode="after")
    def _fits(self) -> GatedLinear:
        if self.value_head_dim is None and self.head_dim > 128:
            raise ValueError(f"values twice as wide as head_dim {self.head_dim} exceed 256: give value_head_dim")
        return self

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_head_dim or 2 * self.head_dim

    def rows(self) -> list[int]:
        """Rows of the fused input projection: q, k, v, output gate, what the decay is made of."""
        keys, values = (self.num_heads * size for size in self.state_shape)
        return [keys, keys, values, values, self.gate_rank if self.gate == "channel" else self.num_heads]

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in) of its matrix products: fused input, the channel gate's second, out."""
        keys, values = (self.num_heads * size for size in self.state_shape)
        up = ((keys, self.gate_rank),) if self.gate == "channel" else ()
        return ((sum(self.rows()), hidden_size), *up, (hidden_size, values))

    def num_params(self, hidden_size: int) -> int:
        keys, values = self.num_heads * self.head_dim, self.state_shape[1]
        biases = keys if self.gate == "channel" else 2 * self.num_heads
        return super().num_params(hidden_size) + biases + values

    def mixing_flops(self, seq_len: int) -> float:
        """The recurrence with its decay."""
        rows, columns = self.state_shape
        return super().mixing_flops(seq_len) + self.num_heads * rows * columns

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> GatedLinearLayer:
        return GatedLinearLayer(self, hidden_size, layer, name, norm_eps, make)


class GatedLinearLayer(RecurrentLayer):
    """The module behind `GatedLinear`. Between passes it keeps the state.

    The gate's own small parameters stand outside the linears: they are too small to quantize.
    """

    pieces: ClassVar[dict[str, tuple[str, ...]]] = {"qkvg": ("q", "k", "v", "gate", "decay"), "out": ("out",)}
    residual: ClassVar[str] = "out"

    def __init__(
        self, spec: GatedLinear, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        keys, values = (spec.num_heads * size for size in spec.state_shape)
        self.rows = {"qkvg": spec.rows(), "out": [hidden_size]}
        self.qkvg = make(f"{name}.qkvg", hidden_size, sum(spec.rows()), False)
        self.out = make(f"{name}.out", values, hidden_size, False)
        self.head_norm = RMSNorm(spec.state_shape[1], norm_eps)
        if spec.gate == "channel":
            self.decay_up = nn.Parameter(torch.empty(keys, spec.gate_rank))
            self.decay_bias = nn.Parameter(torch.empty(keys))
            self.initial: dict[str, Initial] = {"decay_up": (0.0, spec.gate_rank**-0.5), "decay_bias": (0.0, 0.0)}
        else:
            self.log_rate = nn.Parameter(torch.empty(spec.num_heads))
            self.step_bias = nn.Parameter(torch.empty(spec.num_heads))
            self.initial = {"log_rate": initial_rates, "step_bias": initial_steps}

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        q, k, v, gate, low = self.qkvg(x).split(self.rows["qkvg"], -1)
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (q, k, v))
        if spec.gate == "channel":
            logits = F.linear(low, self.decay_up, self.decay_bias).unflatten(-1, (spec.num_heads, -1))
            decay = F.logsigmoid(wide(logits)) / spec.gate_root
        else:
            step = F.softplus(wide(low) + wide(self.step_bias))
            decay = -step * wide(self.log_rate).exp()
            k = k * step[..., None].to(k.dtype)
        scale = spec.head_dim**-0.5
        mixed, state = scan(q, k, v, decay, state=known, reset=begins, scale=scale, return_state=True)
        return self.out(F.silu(gate) * self.head_norm(mixed).flatten(-2)), state


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is: decays need more digits than 16-bit floats have."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def initial_rates(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """log A, A uniform in [1, 16], as Mamba-2 begins."""
    return torch.empty(shape).uniform_(1, 16, generator=generator).log()


def initial_steps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Inverse softplus of steps dt log-uniform in [0.001, 0.1], as Mamba-2 begins."""
    steps = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    return steps + torch.log(-torch.expm1(-steps))
