"""Softmax attention with rotary positions: grouped KV heads, sliding window, optional biases, query/key norms, softcap and sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.cache import LayerCache, keys_and_values
from hone.cost.dims import Attending, Widths, attention_widths
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import (
    LinearSpec,
    NormSpec,
    Output,
    Parameter,
    ParameterSpec,
    grouped_pieces,
    projection_in,
    projection_out,
)
from hone.model.mixer import Mixer
from hone.model.rope import Rope
from hone.ops import rope


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
    reads_once: ClassVar[bool] = True

    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")
    window: int | None = Field(
        None,
        gt=0,
        description="A token attends to itself and the window - 1 tokens before it; empty for all before it.",
    )
    qkv_bias: bool = Field(False, description="Biases on queries, keys and values.")
    out_bias: bool = Field(False, description="A bias on the output projection.")
    qk_norm: bool = Field(False, description="RMS norm of each query and key head before the rotation.")
    qk_norm_over: Literal["head", "projection"] = Field(
        "head", description="What qk_norm norms: each head, or all query heads (and all key heads) as one vector."
    )
    rotary_dim: int | None = Field(
        None, ge=0, description="Channels of a head that are rotated, the first ones; empty for all, 0 for none (NoPE)."
    )
    scale: float | None = Field(None, gt=0, description="Scale of the scores; head_dim ** -0.5 when empty.")
    softcap: float | None = Field(
        None, gt=0, description="Cap of the scores: softcap * tanh(score / softcap); empty for none."
    )
    sinks: bool = Field(
        False, description="One learned score a head without a value joins the softmax (gpt-oss), arXiv:2309.17453."
    )

    @model_validator(mode="after")
    def _rotation_fits(self) -> Self:
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(f"rotary_dim {self.rotary_dim} is odd or above head_dim {self.head_dim}")
        pairs = (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2
        if self.rope.scaling == "longrope" and len(self.rope.short_factor) != pairs:
            raise ValueError(
                f"longrope has {len(self.rope.short_factor)} short_factor entries for {pairs} rotated pairs of channels"
            )
        return self

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        qkv, out = super().linears(hidden_size)
        return replace(qkv, bias=self.qkv_bias), replace(out, bias=self.out_bias)

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        sinks = (ParameterSpec("sinks", (self.num_heads,), heads=self.num_heads),) if self.sinks else ()
        if not self.qk_norm:
            return sinks
        whole = self.qk_norm_over == "projection"
        queries, keys = (self.num_heads, self.num_kv_heads) if whole else (1, 1)
        norms = tuple(
            NormSpec(f"{piece}_norm", heads * self.head_dim, over=Output("mixer.qkv", piece) if whole else None)
            for piece, heads in (("q", queries), ("k", keys))
        )
        return norms + sinks

    def local(self, num_ranks: int) -> Self:
        if num_ranks > 1 and self.qk_norm and self.qk_norm_over == "projection":
            raise SpecError(
                f"'{self.kind}' with qk_norm_over 'projection' cannot be split over {num_ranks} tensor-parallel ranks: "
                "the norm needs all heads",
                fix="set tensor_parallel_size=1",
            )
        return super().local(num_ranks)

    def mixing(self) -> Attending:
        return Attending(self.num_heads, self.num_kv_heads, self.head_dim, self.window)

    def mixing_flops(self, seq_len: int) -> float:
        return self.mixing().mixing_flops(seq_len)

    def state_values(self, seq_len: int) -> float:
        return self.mixing().state_values(seq_len)

    def cache(self) -> LayerCache:
        return keys_and_values(self.num_kv_heads, self.head_dim)

    def prepare(self, context: Context, x: Tensor) -> None:
        if self.rotary_dim != 0:
            context.rotary(self.rope, self.rotary_dim or self.head_dim, x.dtype)
        context.expect(x, self.head_dim, self.window, softcap=self.softcap, sinks=self.sinks)

    def build(self, place: Placement) -> AttentionLayer:
        usual = self.rotary_dim is None and self.qk_norm_over == "head"
        return (AttentionLayer if usual else PartlyRotatedLayer)(self, place)


class AttentionLayer(GroupedHeadsLayer):
    """The module behind `Attention`. `forward(x [..., D], context) -> [..., D]`."""

    def __init__(self, spec: Attention, place: Placement) -> None:
        super().__init__(spec, place)
        self.shares_kv = False  # set by the decoder when a later layer attends to these keys
        self.kv_rounding: Any = (
            None  # set where a checkpoint has scales for its KV cache (hone.model.quantized.kv_cache)
        )
        self.options: dict[str, Any] = {"scale": spec.scale or self.scale, "window": spec.window}
        if spec.softcap is not None:
            self.options["softcap"] = spec.softcap

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        turning, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        q, k = turning.split([spec.num_heads, spec.num_kv_heads], dim=-2)
        norms = (self.q_norm, self.k_norm) if spec.qk_norm else None
        if self.kv_rounding is None and context.rotate_and_cache(self.layer, q, k, v, cos, sin, norms):
            return self._mixed(context, q, None, None)
        if norms is not None:
            q, k = rope(self.q_norm(q), cos, sin), rope(self.k_norm(k), cos, sin)
        else:
            q, k = rope(turning, cos, sin).split([spec.num_heads, spec.num_kv_heads], dim=-2)
        if torch.is_grad_enabled() and hasattr(self.qkv, "of_gate_up"):
            v = v.contiguous()  # an adapter's product does not keep its output, which v would keep whole
        return self._attended(context, q, k, v)

    def _attended(self, context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output for rotated heads."""
        if self.kv_rounding is not None:
            k, v = self.kv_rounding(k, v)
        if self.shares_kv:
            context.share_kv(self.layer, k, v)
        return self._mixed(context, q, k, v)

    def _mixed(self, context: Context, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        options = {**self.options, "sinks": self.sinks} if self.spec.sinks else self.options
        return self.out(context.attend(self.layer, q, k, v, **options).flatten(-2))


class PartlyRotatedLayer(AttentionLayer):
    """`AttentionLayer` for the options that are rare: heads rotated in part or not at all, norms over all heads at once."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        q, k, v = self.qkv(x).split(self.rows["qkv"], dim=-1)
        whole = spec.qk_norm and spec.qk_norm_over == "projection"
        if whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
        if spec.qk_norm and not whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rotary_dim != 0:
            cos, sin = context.rotary(spec.rope, spec.rotary_dim or spec.head_dim, x.dtype)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        return self._attended(context, q, k, v)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, Dh] with its first channels rotated, as many as there are angles for."""
    dim = 2 * cos.shape[-1]
    if dim == x.shape[-1]:
        return rope(x, cos, sin)
    return torch.cat((rope(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
