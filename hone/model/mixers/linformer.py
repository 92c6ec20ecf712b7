"""Linformer: keys and values are projected along the sequence to a fixed number of rows, so attention is linear in length."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.cost.facts import Widths, attention_widths
from hone.model.context import Context
from hone.model.linear import MakeLinear
from hone.model.mixer import Mixer, refuse_packed
from hone.model.mixers.attention import Rope
from hone.ops import attend
from hone.ops.lean import rope
from hone.ops.masks import FULL


class Linformer(Mixer):
    """An encoder's attention to `rank` mixtures of all keys and values, learned per position. Wang et al. 2020, arXiv:2006.04768.

    E and F [max_seq_len, rank] are shared by the heads; a shorter input uses their first rows, a longer one is an error.
    Every token sees every other, so it cannot predict the next one: for encoding texts, not for writing or scoring them.
    """

    paper: ClassVar[str] = "arXiv:2006.04768"
    complexity: ClassVar[str] = "O(S rank)"
    causal: ClassVar[bool] = False

    num_heads: int = Field(gt=0, description="Query heads.")
    num_kv_heads: int = Field(gt=0, description="Key/value heads; each serves num_heads / num_kv_heads query heads.")
    head_dim: int = Field(gt=0, description="Width of a head.")
    max_seq_len: int = Field(gt=0, description="Longest input, in tokens: rows of E and F.")
    rank: int = Field(64, gt=0, description="Rows that keys and values are projected to.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions of queries and, before E, of keys.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Linformer:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs")
        return self

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in): fused qkv, out. E and F count as mixing."""
        queries = self.num_heads * self.head_dim
        return ((queries + 2 * self.num_kv_heads * self.head_dim, hidden_size), (hidden_size, queries))

    def num_params(self, hidden_size: int) -> int:
        return sum(n_out * k_in for n_out, k_in in self.matmuls(hidden_size)) + 2 * self.max_seq_len * self.rank

    def mixing_flops(self, seq_len: int) -> float:
        """Keys and values through E and F, then attention to `rank` rows."""
        return 4.0 * self.rank * self.head_dim * (self.num_kv_heads + self.num_heads)

    def state_values(self, seq_len: int) -> float:
        """The projected keys and values: an encoder does not go on from them."""
        return 2.0 * self.num_kv_heads * self.head_dim * self.rank

    def widths(self, hidden_size: int) -> Widths:
        return attention_widths(self.num_heads, self.num_kv_heads, self.head_dim)

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> LinformerLayer:
        return LinformerLayer(self, hidden_size, name, make)


class LinformerLayer(nn.Module):
    """The module behind `Linformer`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    pieces: ClassVar[dict[str, tuple[str, ...]]] = {"qkv": ("q", "k", "v"), "out": ("out",)}
    residual: ClassVar[str] = "out"

    def __init__(self, spec: Linformer, hidden_size: int, name: str, make: MakeLinear) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.rows = {"qkv": [queries, keys, keys], "out": [hidden_size]}
        self.qkv = make(f"{name}.qkv", hidden_size, queries + 2 * keys, False)
        self.out = make(f"{name}.out", queries, hidden_size, False)
        self.mix_keys = nn.Parameter(torch.empty(spec.max_seq_len, spec.rank))
        self.mix_values = nn.Parameter(torch.empty(spec.max_seq_len, spec.rank))
        self.initial = {"mix_keys": _between_roots, "mix_values": _between_roots}
        self.scale = spec.head_dim**-0.5

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, seq_len = self.spec, x.shape[-2]
        refuse_packed(context, "linformer")
        context.must_be_whole("linformer")
        if seq_len > spec.max_seq_len:
            raise SpecError(
                f"linformer mixes up to {spec.max_seq_len} tokens, the input has {seq_len}",
                fix=f"cut it to {spec.max_seq_len}, or train with a longer max_seq_len",
            )
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        turning, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        q, k = rope(turning, cos, sin).split([spec.num_heads, spec.num_kv_heads], dim=-2)
        k = torch.einsum("bshd,sr->brhd", k, self.mix_keys[:seq_len])
        v = torch.einsum("bshd,sr->brhd", v, self.mix_values[:seq_len])
        return self.out(attend(q, k, v, FULL, scale=self.scale).flatten(-2))


def _between_roots(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform within 1 / sqrt(rank) of zero, as in the paper's code."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
