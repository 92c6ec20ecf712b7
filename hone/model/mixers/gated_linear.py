"""Gated linear attention: linear attention whose state decays by a rate computed from each token."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import (
    Computed,
    LinearSpec,
    NormSpec,
    Parameter,
    ParameterSpec,
    Piece,
    projection_in,
    projection_out,
)
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer
from hone.ops import scan


class GatedLinear(Recurrent):
    """Linear attention with a learned decay: S_t = diag(a_t) S_(t-1) + k_t^T v_t. Yang et al. 2023, arXiv:2312.06635.

    gate `channel`: a_t = sigmoid(x W1 W2 + b)^(1/16), a number a key channel, W1 of low rank. gate `head`: the scalar
    of Mamba-2 (arXiv:2405.21060), a_t = exp(-dt_t A) with keys scaled by dt_t = softplus(x w + b), a number a head;
    cheaper on a GPU. Heads are normalised and gated before the output projection.
    """

    paper: ClassVar[str] = "arXiv:2312.06635"
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    value_head_dim: int | None = Field(
        None, gt=0, le=256, description="Width of a head's values. Default: twice head_dim."
    )
    gate: Literal["channel", "head"] = Field("channel", description="Decay per key channel, or per head (Mamba-2).")
    gate_rank: int = Field(16, gt=0, description="Rank of the channel gate's projection.")
    gate_root: float = Field(16.0, ge=1, description="The channel gate is this root of a sigmoid: 16 decays slowly.")

    @model_validator(mode="after")
    def _fits(self) -> GatedLinear:
        if self.value_head_dim is None and self.head_dim > 128:
            raise ValueError(f"values twice as wide as head_dim {self.head_dim} exceed 256: give value_head_dim")
        return self

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_head_dim or 2 * self.head_dim

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """q, k, v, output gate and the decay's inputs, fused; out."""
        heads, (keys, values) = self.num_heads, self.state_shape
        widths = {"q": keys, "k": keys, "v": values, "gate": values}
        low = Piece("decay", self.gate_rank, replicate=True) if self.gate == "channel" else Piece("decay", heads, heads)
        pieces = [Piece(name, heads * width, heads) for name, width in widths.items()]
        return (
            projection_in("qkvg", hidden_size, *pieces, low),
            projection_out(hidden_size, heads, values, reads=Computed("mixer.mixed")),
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """The gate's parameters, outside the linears because they are too small to quantize."""
        heads, (keys, values) = self.num_heads, self.state_shape
        norm = NormSpec("head_norm", values)
        if self.gate == "head":
            return norm, *rates_and_steps(heads)
        up = (0.0, self.gate_rank**-0.5)
        return (
            norm,
            ParameterSpec("decay_up", (heads * keys, self.gate_rank), up, heads=heads, multiplied=True),
            ParameterSpec("decay_bias", (heads * keys,), (0.0, 0.0), heads=heads),
        )

    def mixing_flops(self, seq_len: int) -> float:
        """The recurrence with its decay."""
        rows, columns = self.state_shape
        return super().mixing_flops(seq_len) + self.num_heads * rows * columns

    def build(self, place: Placement) -> GatedLinearLayer:
        return GatedLinearLayer(self, place)


class GatedLinearLayer(RecurrentLayer):
    """The module behind `GatedLinear`. Between passes it keeps the state."""

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


def rates_and_steps(heads: int) -> tuple[ParameterSpec, ParameterSpec]:
    """Parameters of Mamba-2's scalar decay, one number per head each."""
    return (
        ParameterSpec("log_rate", (heads,), initial_rates, heads=heads),
        ParameterSpec("step_bias", (heads,), initial_steps, heads=heads),
    )


def initial_rates(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """log A, A uniform in [1, 16]: Mamba-2's initialisation."""
    return torch.empty(shape).uniform_(1, 16, generator=generator).log()


def initial_steps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Inverse softplus of steps dt log-uniform in [0.001, 0.1]: Mamba-2's initialisation."""
    steps = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    return steps + torch.log(-torch.expm1(-steps))
