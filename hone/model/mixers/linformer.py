"""Linformer: keys and values are projected along the sequence to a fixed number of rows, so attention is linear in length."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import Parameter, ParameterSpec
from hone.model.mixer import refuse_packed
from hone.model.mixers.attention import GroupedHeads, GroupedHeadsLayer
from hone.model.rope import Rope
from hone.ops import attend
from hone.ops.attention.masks import FULL


class Linformer(GroupedHeads):
    """An encoder's attention to `rank` mixtures of all keys and values, learned per position. Wang et al. 2020, arXiv:2006.04768.

    E and F [max_seq_len, rank] are shared by the heads; a shorter input uses their first rows, a longer one is an
    error. Every token attends to every other, so it cannot predict the next one: for encoders, not for generation or
    scoring.
    """

    paper: ClassVar[str] = "arXiv:2006.04768"
    complexity: ClassVar[str] = "O(S rank)"
    causal: ClassVar[bool] = False
    splits: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads")

    max_seq_len: int = Field(gt=0, description="Longest input, in tokens: rows of E and F.")
    rank: int = Field(64, gt=0, description="Rows that keys and values are projected to.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions of queries and, before E, of keys.")

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        shape = (self.max_seq_len, self.rank)
        return tuple(ParameterSpec(name, shape, _between_roots) for name in ("mix_keys", "mix_values"))

    def mixing_flops(self, seq_len: int) -> float:
        """Keys and values times E and F, then attention to `rank` rows."""
        return 4.0 * self.rank * self.head_dim * (self.num_kv_heads + self.num_heads)

    def state_values(self, seq_len: int) -> float:
        """The projected keys and values; an encoder does not decode from them."""
        return 2.0 * self.num_kv_heads * self.head_dim * self.rank

    def build(self, place: Placement) -> LinformerLayer:
        return LinformerLayer(self, place)


class LinformerLayer(GroupedHeadsLayer):
    """The module behind `Linformer`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, seq_len = self.spec, x.shape[-2]
        refuse_packed(context, "linformer")
        context.must_be_whole("linformer")
        if seq_len > spec.max_seq_len:
            raise SpecError(
                f"linformer mixes up to {spec.max_seq_len} tokens, the input has {seq_len}",
                fix=f"cut it to {spec.max_seq_len}, or train with a longer max_seq_len",
            )
        q, k, v = self.rotated_qkv(x, context)
        k = torch.einsum("bshd,sr->brhd", k, self.mix_keys[:seq_len])
        v = torch.einsum("bshd,sr->brhd", v, self.mix_values[:seq_len])
        return self.out(attend(q, k, v, FULL, scale=self.scale).flatten(-2))


def _between_roots(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform within 1 / sqrt(rank) of zero, as in the paper's code."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
