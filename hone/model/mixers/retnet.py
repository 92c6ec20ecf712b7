"""Retention: linear attention whose state decays at a fixed rate for each head."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, Piece, projection_in, projection_out
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer
from hone.model.rope import Rope
from hone.ops import rope, scan


class RetNet(Recurrent):
    """Multi-scale retention: S_t = (1 - 2^(-5-h)) S_(t-1) + k_t^T v_t in head h. Sun et al. 2023, arXiv:2307.08621.

    Rotated queries and keys, each head's result normalised separately (so that the paper's normalisation of the
    weights has no effect), then a swish gate.
    """

    paper: ClassVar[str] = "arXiv:2307.08621"

    value_head_dim: int | None = Field(
        None, gt=0, le=256, description="Width of a head's values. Default: twice head_dim."
    )
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @model_validator(mode="after")
    def _fits(self) -> RetNet:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels")
        if self.value_head_dim is None and self.head_dim > 128:
            raise ValueError(f"values twice as wide as head_dim {self.head_dim} exceed 256: give value_head_dim")
        return self

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_head_dim or 2 * self.head_dim

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        heads, (keys, values) = self.num_heads, self.state_shape
        widths = {"q": keys, "k": keys, "v": values, "gate": values}
        pieces = [Piece(name, heads * width, heads) for name, width in widths.items()]
        return projection_in("qkvg", hidden_size, *pieces), projection_out(
            hidden_size, heads, values, reads=Computed("mixer.mixed")
        )

    def build(self, place: Placement) -> RetNetLayer:
        return RetNetLayer(self, place)


class RetNetLayer(RecurrentLayer):
    """The module behind `RetNet`. Between passes it keeps the state."""

    def __init__(self, spec: RetNet, place: Placement) -> None:
        super().__init__(spec, place)
        self.norm_eps = place.norm_eps

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        q, k, v, gate = self.qkvg(x).split(self.rows["qkvg"], -1)
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (q, k, v))
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        decay = retention_decays(spec.num_heads, x.device)
        mixed, state = scan(
            rope(q, cos, sin), rope(k, cos, sin), v, decay,
            state=known, reset=begins, scale=spec.head_dim**-0.5, return_state=True,
        )  # fmt: skip
        normed = F.layer_norm(mixed, mixed.shape[-1:], eps=self.norm_eps).flatten(-2)
        return self.out(F.silu(gate) * normed), state


def retention_decays(num_heads: int, device: torch.device) -> Tensor:
    """log(1 - 2^(-5-h)) of heads h = 0 ... H - 1, float32 [H]."""
    heads = torch.arange(num_heads, device=device, dtype=torch.float32)
    return torch.log1p(-torch.exp((-5 - heads) * math.log(2)))
