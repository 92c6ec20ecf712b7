"""Multi-head latent attention: keys and values come from one small latent a token, and only the latent is kept for decoding."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hone.cost.cache import CacheTensor, LayerCache
from hone.cost.facts import Widths, mean_positions
from hone.model.context import Context
from hone.model.linear import MakeLinear
from hone.model.mixer import Mixer
from hone.model.mixers.attention import Rope
from hone.model.norm import RMSNorm
from hone.ops.lean import rope


class MLA(Mixer):
    """Multi-head latent attention, decoded from the latents with absorbed matrices. DeepSeek-AI 2024, arXiv:2405.04434.

    A token's latent (`latent_dim` numbers, normed) gives every head its key's content part and its value; one rotated key
    part of `rope_dim` is shared by all heads. Decoding keeps latent_dim + rope_dim numbers a token, not 2 a head value:
    the matrix from latent to keys is multiplied into the query, the one to values into the result.
    """

    paper: ClassVar[str] = "arXiv:2405.04434"
    complexity: ClassVar[str] = "O(S^2)"

    num_heads: int = Field(gt=0, description="Heads.")
    head_dim: int = Field(128, gt=0, description="Width of a head's content part.")
    value_dim: int | None = Field(None, gt=0, description="Width of a head's value; head_dim when empty.")
    rope_dim: int = Field(64, gt=0, description="Width of the rotated part, one key of it for all heads.")
    latent_dim: int = Field(512, gt=0, description="Width of the latent that keys and values are made from.")
    q_latent_dim: int | None = Field(None, gt=0, description="Width of the queries' latent; empty: made directly.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @model_validator(mode="after")
    def _pairs(self) -> MLA:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim {self.rope_dim} is odd; rotary positions turn pairs")
        return self

    @property
    def values(self) -> int:
        """Width of a head's value."""
        return self.value_dim or self.head_dim

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in): queries (through their latent, if any), latent with the rotated key, keys and values, out."""
        queries = self.num_heads * (self.head_dim + self.rope_dim)
        low = self.q_latent_dim
        return (
            *(((queries, hidden_size),) if low is None else ((low, hidden_size), (queries, low))),
            (self.latent_dim + self.rope_dim, hidden_size),
            (self.num_heads * (self.head_dim + self.values), self.latent_dim),
            (hidden_size, self.num_heads * self.values),
        )

    def num_params(self, hidden_size: int) -> int:
        weights = super().num_params(hidden_size)
        return weights + self.latent_dim + (self.q_latent_dim or 0)

    def mixing_flops(self, seq_len: int) -> float:
        """Of the expanded form, in which training runs."""
        return 2.0 * self.num_heads * (self.head_dim + self.rope_dim + self.values) * mean_positions(seq_len)

    def state_values(self, seq_len: int) -> float:
        return float((self.latent_dim + self.rope_dim) * seq_len)

    def widths(self, hidden_size: int) -> Widths:
        inner = self.num_heads * (self.head_dim + self.rope_dim)
        projected = inner + 2 * self.latent_dim + self.rope_dim + self.num_heads * (self.head_dim + self.values)
        projected += 2 * (self.q_latent_dim or 0)
        return Widths(projected=projected, turned=2 * inner, mixed=self.num_heads * self.values, extra=self.rope_dim)

    def cache(self) -> LayerCache:
        return (CacheTensor("latent", (self.latent_dim + self.rope_dim,)),)

    def prepare(self, context: Context, x: Tensor) -> None:
        context.rotary(self.rope, self.rope_dim, x.dtype)
        context.expect(x, max(self.head_dim + self.rope_dim, self.values), None)

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> MLALayer:
        return MLALayer(self, hidden_size, layer, name, norm_eps, make)


class MLALayer(nn.Module):
    """The module behind `MLA`. `forward(x [..., D], context) -> [..., D]`."""

    residual: ClassVar[str] = "out"

    def __init__(self, spec: MLA, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        queries = spec.num_heads * (spec.head_dim + spec.rope_dim)
        low, both = spec.q_latent_dim, spec.head_dim + spec.values
        sizes = {
            **(
                {"q": (hidden_size, queries)} if low is None else {"q_down": (hidden_size, low), "q_up": (low, queries)}
            ),
            "kv_down": (hidden_size, spec.latent_dim + spec.rope_dim),
            "kv_up": (spec.latent_dim, spec.num_heads * both),
            "out": (spec.num_heads * spec.values, hidden_size),
        }
        self.pieces = {part: (part,) for part in sizes}
        self.rows = {part: [rows] for part, (_, rows) in sizes.items()}
        for part, (inward, outward) in sizes.items():
            setattr(self, part, make(f"{name}.{part}", inward, outward, False))
        self.q_latent_norm = None if low is None else RMSNorm(low, norm_eps)
        self.latent_norm = RMSNorm(spec.latent_dim, norm_eps)
        self.scale = (spec.head_dim + spec.rope_dim) ** -0.5

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        cos, sin = context.rotary(spec.rope, spec.rope_dim, x.dtype)
        q = self.q(x) if self.q_latent_norm is None else self.q_up(self.q_latent_norm(self.q_down(x)))
        q_plain, q_turned = q.unflatten(-1, (spec.num_heads, -1)).split([spec.head_dim, spec.rope_dim], -1)
        q_turned = rope(q_turned, cos, sin)
        latent, turned = self.kv_down(x).split([spec.latent_dim, spec.rope_dim], -1)
        latent, turned = self.latent_norm(latent), rope(turned.unsqueeze(-2), cos, sin)
        mix = self._absorbed if context.cached else self._expanded
        return self.out(mix(q_plain, q_turned, latent, turned, context))

    def _expanded(self, q_plain: Tensor, q_turned: Tensor, latent: Tensor, turned: Tensor, context: Context) -> Tensor:
        """Keys and values of every head written out: [..., H * value_dim]."""
        spec = self.spec
        k_plain, v = self.kv_up(latent).unflatten(-1, (spec.num_heads, -1)).split([spec.head_dim, spec.values], -1)
        q = torch.cat((q_plain, q_turned), -1)
        k = torch.cat((k_plain, turned.expand(*k_plain.shape[:-1], -1)), -1)
        return context.attend(self.layer, q, k, v, scale=self.scale, window=None).flatten(-2)

    def _absorbed(self, q_plain: Tensor, q_turned: Tensor, latent: Tensor, turned: Tensor, context: Context) -> Tensor:
        """The same through the latents, which the cache keeps: [..., H * value_dim]."""
        spec = self.spec
        up = _weight(self.kv_up, q_plain.dtype).unflatten(0, (spec.num_heads, -1))
        to_key, to_value = up.split([spec.head_dim, spec.values], 1)  # [H, width, latent_dim] each
        q = torch.cat((torch.einsum("...hd,hdl->...hl", q_plain, to_key), q_turned), -1)
        kept = torch.cat((latent, turned.squeeze(-2)), -1)
        mixed = context.attend_latent(self.layer, q, kept, value_dim=spec.latent_dim, scale=self.scale)
        return torch.einsum("...hl,hvl->...hv", mixed, to_value).flatten(-2)


def _weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] of a linear; of a quantized one a copy."""
    return linear.weight if hasattr(linear, "weight") else linear.dequantize(dtype)
