"""Multi-head latent attention: keys and values are projected from one small latent per token, and decoding keeps only the latent."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.cost.cache import CacheTensor, LayerCache
from hone.cost.dims import Widths, mean_positions
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, Norm, NormSpec, Parameter, Piece, projection_in, projection_out
from hone.model.mixer import Mixer
from hone.model.rope import Rope
from hone.ops import rope


class MLA(Mixer):
    """Multi-head latent attention, decoded from the latents with absorbed matrices. DeepSeek-AI 2024, arXiv:2405.04434.

    Every head's value and the content part of its key are projected from the token's normed latent (`latent_dim`
    numbers); all heads share one rotated key part of `rope_dim`. Decoding keeps latent_dim + rope_dim numbers per
    token: the projection to keys is applied to the query instead, and the projection to values to the result.
    """

    paper: ClassVar[str] = "arXiv:2405.04434"
    complexity: ClassVar[str] = "O(S^2)"
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    num_heads: int = Field(gt=0, description="Heads.")
    head_dim: int = Field(128, gt=0, description="Width of a head's content part.")
    value_dim: int | None = Field(None, gt=0, description="Width of a head's value; head_dim when empty.")
    rope_dim: int = Field(64, gt=0, description="Width of the rotated part; all heads share its key.")
    latent_dim: int = Field(512, gt=0, description="Width of the latent that keys and values are projected from.")
    q_latent_dim: int | None = Field(
        None, gt=0, description="Width of the queries' latent; empty: queries are projected directly."
    )
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")
    rope_interleaved: bool = Field(
        False,
        description="Rotated pairs are neighbours (0, 1), (2, 3) ..., as DeepSeek stores them; else channels i and i + rope_dim / 2.",
    )
    mscale_all_dim: float = Field(
        0.0,
        ge=0,
        description="With a scaling of rope by a factor, scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2 (YaRN's "
        "temperature as DeepSeek applies it); 0: they are not.",
    )
    latent_norm_eps: float | None = Field(
        None, gt=0, description="Added to the mean square in the norms of latents; the model's norm_eps when empty."
    )

    latent_norm: bool = Field(
        True,
        description="Whether the latent of keys and values is normed; no class of transformers knows one that is not.",
    )

    @model_validator(mode="after")
    def _pairs(self) -> MLA:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim {self.rope_dim} is odd; rotary positions rotate pairs of channels")
        return self

    @property
    def values(self) -> int:
        """Width of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def scale(self) -> float:
        """The scale of the scores."""
        scaled = self.rope.scaling != "none" and self.rope.factor > 1
        warmer = 0.1 * self.mscale_all_dim * math.log(self.rope.factor) + 1.0 if scaled else 1.0
        return (self.head_dim + self.rope_dim) ** -0.5 * warmer * warmer

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """Queries (through their latent, if any), latent with the rotated key, keys and values, out."""
        heads, low = self.num_heads, self.q_latent_dim
        queries = heads * (self.head_dim + self.rope_dim)
        down = Piece("kv_down", self.latent_dim + self.rope_dim)
        up = Piece("kv_up", heads * (self.head_dim + self.values), heads)
        latent = Norm("mixer.latent_norm") if self.latent_norm else Computed("mixer.latent")
        return (
            *(
                (projection_in("q", hidden_size, Piece("q", queries, heads)),)
                if low is None
                else (
                    projection_in("q_down", hidden_size, Piece("q_down", low), shard="none"),
                    projection_in("q_up", low, Piece("q_up", queries, heads), reads=Norm("mixer.q_latent_norm")),
                )
            ),
            projection_in("kv_down", hidden_size, down, shard="none"),
            projection_in("kv_up", self.latent_dim, up, reads=latent),
            projection_out(hidden_size, heads, self.values, reads=Computed("mixer.mixed")),
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        low = self.q_latent_dim
        norms = () if low is None else (NormSpec("q_latent_norm", low, eps=self.latent_norm_eps),)
        if not self.latent_norm:
            return norms
        return (*norms, NormSpec("latent_norm", self.latent_dim, eps=self.latent_norm_eps))

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs of the expanded form, which training uses."""
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

    def build(self, place: Placement) -> MLALayer:
        return MLALayer(self, place)


class MLALayer(Block):
    """The module behind `MLA`. `forward(x [..., D], context) -> [..., D]`."""

    def __init__(self, spec: MLA, place: Placement) -> None:
        super().__init__(spec, place)
        self.scale = spec.scale

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        cos, sin = context.rotary(spec.rope, spec.rope_dim, x.dtype)
        q = self.q(x) if spec.q_latent_dim is None else self.q_up(self.q_latent_norm(self.q_down(x)))
        q_plain, q_rope = q.unflatten(-1, (spec.num_heads, -1)).split([spec.head_dim, spec.rope_dim], -1)
        q_rope = self._rotated(q_rope, cos, sin)
        latent, k_rope = self.kv_down(x).split([spec.latent_dim, spec.rope_dim], -1)
        latent = self.latent_norm(latent) if spec.latent_norm else latent
        k_rope = self._rotated(k_rope.unsqueeze(-2), cos, sin)
        mix = self._absorbed if context.cached else self._expanded
        return self.out(mix(q_plain, q_rope, latent, k_rope, context))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., heads, rope_dim] rotated. Interleaved pairs come out as halves, in queries and keys alike: scores are the same."""
        if self.spec.rope_interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rope(x, cos, sin)

    def _expanded(self, q_plain: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, context: Context) -> Tensor:
        """Attention with every head's keys and values materialised: [..., H * value_dim]."""
        spec = self.spec
        k_plain, v = self.kv_up(latent).unflatten(-1, (spec.num_heads, -1)).split([spec.head_dim, spec.values], -1)
        q = torch.cat((q_plain, q_rope), -1)
        k = torch.cat((k_plain, k_rope.expand(*k_plain.shape[:-1], -1)), -1)
        return context.attend(self.layer, q, k, v, scale=self.scale, window=None).flatten(-2)

    def _absorbed(self, q_plain: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, context: Context) -> Tensor:
        """The same by attention to the cached latents: [..., H * value_dim]."""
        spec = self.spec
        up = self.kv_up.dequantize(q_plain.dtype).unflatten(0, (spec.num_heads, -1))
        to_key, to_value = up.split([spec.head_dim, spec.values], 1)  # [H, width, latent_dim] each
        q = torch.cat((torch.einsum("...hd,hdl->...hl", q_plain, to_key), q_rope), -1)
        kept = torch.cat((latent, k_rope.squeeze(-2)), -1)
        mixed = context.attend_latent(self.layer, q, kept, value_dim=spec.latent_dim, scale=self.scale)
        return torch.einsum("...hl,hvl->...hv", mixed, to_value).flatten(-2)
