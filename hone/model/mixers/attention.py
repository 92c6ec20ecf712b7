"""Softmax attention with rotary positions: grouped KV heads, sliding window, optional biases and query/key norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.base.spec import Spec
from hone.cost.cache import LayerCache, keys_and_values
from hone.cost.facts import Attending, Widths, attention_widths
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import LinearSpec, NormSpec, Parameter, grouped_pieces, projection_in, projection_out
from hone.model.mixer import Mixer
from hone.ops import rope


class Rope(Spec):
    """Rotary positions and their scaling for longer contexts."""

    theta: float = Field(10000.0, gt=0, description="Base of the wavelengths.")
    scaling: Literal["none", "linear", "llama3"] = Field(
        "none", description="Scaling of the positions for longer contexts."
    )
    factor: float = Field(1.0, ge=1, description="Factor by which the context was extended.")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: wavelengths longer than old context / this are scaled."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: wavelengths shorter than old context / this are kept."
    )
    original_max_seq_len: int = Field(8192, gt=0, description="llama3: context length before the extension.")

    @property
    def key(self) -> tuple[float | str, ...]:
        """The fields as plain values: torch.compile cannot look a spec up in a dictionary."""
        return (
            self.theta,
            self.scaling,
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_seq_len,
        )

    def frequencies(self, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
        """Radians per position of each of the head_dim / 2 pairs, float32.

        RoPE: arXiv:2104.09864. linear: position interpolation, arXiv:2306.15595. llama3: the by-parts rule of the
        Llama 3.1 release (long wavelengths divided by `factor`, short ones kept, a ramp between).
        """
        steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
        plain = 1.0 / self.theta**steps
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = self.original_max_seq_len * plain / (2 * torch.pi)  # rotations within the old context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * plain / self.factor + keep * plain


class GroupedHeads(Mixer):
    """Base of the specs whose query heads, in groups, share key/value heads, with rotary positions."""

    num_heads: int = Field(gt=0, description="Query heads.")
    num_kv_heads: int = Field(gt=0, description="Key/value heads; each serves num_heads / num_kv_heads query heads.")
    head_dim: int = Field(gt=0, description="Width of a head.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels")
        return self

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        pieces = grouped_pieces(self.num_heads, self.num_kv_heads, self.head_dim)
        return (
            projection_in("qkv", hidden_size, *pieces),
            projection_out(hidden_size, self.num_heads, self.head_dim),
        )

    def widths(self, hidden_size: int) -> Widths:
        return attention_widths(self.num_heads, self.num_kv_heads, self.head_dim)


class GroupedHeadsLayer(Block):
    """Base of their modules: a fused projection to queries, keys and values, and an output projection."""

    def __init__(self, spec: Any, place: Placement) -> None:
        super().__init__(spec, place)
        self.scale = spec.head_dim**-0.5

    def rotated_qkv(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, S, H, Dh], k [B, S, KV, Dh], v [B, S, KV, Dh]) of x [B, S, D], q and k rotated."""
        spec = self.spec
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        turning, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        q, k = rope(turning, cos, sin).split([spec.num_heads, spec.num_kv_heads], dim=-2)
        return q, k, v


class Attention(GroupedHeads):
    """Softmax attention with rotary positions and grouped key/value heads. Ainslie et al. 2023, arXiv:2305.13245."""

    paper: ClassVar[str] = "arXiv:2305.13245"
    complexity: ClassVar[str] = "O(S^2)"
    can_share_kv: ClassVar[bool] = True
    splits: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads")

    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")
    window: int | None = Field(
        None,
        gt=0,
        description="A token attends to itself and the window - 1 tokens before it; empty for all before it.",
    )
    qkv_bias: bool = Field(False, description="Biases on queries, keys and values.")
    out_bias: bool = Field(False, description="A bias on the output projection.")
    qk_norm: bool = Field(False, description="RMS norm of each query and key head before the rotation.")

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        qkv, out = super().linears(hidden_size)
        return replace(qkv, bias=self.qkv_bias), replace(out, bias=self.out_bias)

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        return (NormSpec("q_norm", self.head_dim), NormSpec("k_norm", self.head_dim)) if self.qk_norm else ()

    def mixing(self) -> Attending:
        return Attending(self.num_heads, self.num_kv_heads, self.head_dim, self.window)

    def mixing_flops(self, seq_len: int) -> float:
        return self.mixing().mixing_flops(seq_len)

    def state_values(self, seq_len: int) -> float:
        return self.mixing().state_values(seq_len)

    def cache(self) -> LayerCache:
        return keys_and_values(self.num_kv_heads, self.head_dim)

    def prepare(self, context: Context, x: Tensor) -> None:
        super().prepare(context, x)
        context.expect(x, self.head_dim, self.window)

    def build(self, place: Placement) -> AttentionLayer:
        return AttentionLayer(self, place)


class AttentionLayer(GroupedHeadsLayer):
    """The module behind `Attention`. `forward(x [..., D], context) -> [..., D]`."""

    def __init__(self, spec: Attention, place: Placement) -> None:
        super().__init__(spec, place)
        self.shares_kv = False  # set by the decoder when a later layer attends to these keys

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        turning, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        q, k = turning.split([spec.num_heads, spec.num_kv_heads], dim=-2)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotate_and_cache(self.layer, q, k, v, cos, sin):
            mixed = context.attend(self.layer, q, None, None, scale=self.scale, window=spec.window)
            return self.out(mixed.flatten(-2))
        if spec.qk_norm:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        else:
            q, k = rope(turning, cos, sin).split([spec.num_heads, spec.num_kv_heads], dim=-2)
        if self.shares_kv:
            context.share_kv(self.layer, k, v)
        mixed = context.attend(self.layer, q, k, v, scale=self.scale, window=spec.window)
        return self.out(mixed.flatten(-2))
