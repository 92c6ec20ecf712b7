"""Longformer: a window for every token, and a few global tokens, with their own projections, that attend to all and to which all attend."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hone.cost.dims import Widths, mean_positions
from hone.model.block import Placement
from hone.model.context import Context, sdpa
from hone.model.linear_spec import Computed, LinearSpec, projection_in
from hone.model.mixers.attention import GroupedHeads, GroupedHeadsLayer
from hone.model.rope import Rope
from hone.ops import attend, rope
from hone.ops.attention.masks import FULL, Mask


class Longformer(GroupedHeads):
    """Sliding window plus global tokens with their own projections, in one softmax. Beltagy et al. 2020, arXiv:2004.05150.

    The first `num_global` tokens of a document are global. Every token attends to the window around it (causal: before
    it) and to the global tokens. A global token's output uses the global projections and attends to the whole document
    (causal: to earlier tokens). The paper's encoder is encoder: true, its language model the default. No dilated
    windows.
    """

    paper: ClassVar[str] = "arXiv:2004.05150"
    complexity: ClassVar[str] = "O(S (w + global))"
    splits: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads")

    window: int = Field(gt=0, description="Tokens of the window to one side, the token itself included.")
    num_global: int = Field(1, gt=0, description="First tokens of a document that are global.")
    encoder: bool = Field(False, description="Whether tokens attend to later tokens too, as in the paper's encoder.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return not self.encoder

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """Of the global projections, only an encoder's keys and values are computed for every token."""
        qkv, out = super().linears(hidden_size)
        q, *keys = (replace(piece, name=f"global_{piece.name}") for piece in qkv.pieces)
        return (
            qkv,
            projection_in("global_q", hidden_size, q, share=0.0),
            projection_in("global_kv", hidden_size, *keys, share=0.0 if self.causal else 1.0),
            replace(out, reads=Computed("mixer.mixed")),
        )

    def mixing_flops(self, seq_len: int) -> float:
        seen = mean_positions(seq_len, self.window) * (1 if self.causal else 2)
        whole = self.num_global * (1 if self.causal else 2)  # columns, and the rows, which are as long together
        return 4.0 * self.num_heads * self.head_dim * min(seq_len, seen + whole)

    def state_values(self, seq_len: int) -> float:
        """Keys and values of the global tokens and of the window, and global keys and values while global tokens are decoded."""
        early = seq_len if seq_len < self.num_global else 0
        return 2.0 * self.num_kv_heads * self.head_dim * (min(seq_len, self.num_global + self.window - 1) + early)

    def widths(self, hidden_size: int) -> Widths:
        plain, keys = super().widths(hidden_size), self.num_kv_heads * self.head_dim
        return plain._replace(extra=plain.extra + (0 if self.causal else 3 * keys))

    def prepare(self, context: Context, x: Tensor) -> None:
        super().prepare(context, x)
        if context.carry is None:
            self.mask(context, x)

    def mask(self, context: Context, x: Tensor) -> Mask:
        """The window and the global columns, within documents; one for all layers of these options in a pass over x [B, S, D]."""
        key = ("longformer", self.window, self.num_global, self.causal)
        if key not in context.memo:
            places, ids = context.positions.expand(x.shape[:2]), context.document_ids
            if ids is None:  # all rows alike
                places, ids = places[:1], torch.zeros_like(places[:1])
            near = (self.window - 1, 0 if self.causal else self.window - 1, 2)
            columns = 2 * ids + (places < self.num_global)
            context.memo[key] = Mask(_causal if self.causal else _two_sided, near, _data(ids), _data(columns))
        return context.memo[key]

    def build(self, place: Placement) -> LongformerLayer:
        return LongformerLayer(self, place)


class Seen(NamedTuple):
    """Decoding state: keys and values of the first tokens and of the last window - 1; global keys and values of the first."""

    k: Tensor
    v: Tensor
    far_k: Tensor
    far_v: Tensor


class LongformerLayer(GroupedHeadsLayer):
    """The module behind `Longformer`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        turning, v = self._heads(self.qkv(x)).split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], -2)
        q, k = rope(turning, cos, sin).split([spec.num_heads, spec.num_kv_heads], -2)
        if context.carry is not None:
            mixed = self._decode(x, q, k, v, (cos, sin), context)
        elif context.document_ids is None:
            mixed = attend(q, k, v, spec.mask(context, x), scale=self.scale)
            mixed = torch.cat((self._global_rows(x, (cos, sin)), mixed[:, spec.num_global :]), 1)
        else:
            mixed = attend(q, k, v, spec.mask(context, x), scale=self.scale)
            mixed = self._packed_rows(x, mixed, (cos, sin), context)
        return self.out(mixed.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim))

    def _global(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of the global projections."""
        k, v = self._heads(self.global_kv(x)).chunk(2, -2)
        return rope(k, *rotary), v

    def _global_rows(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs of the first tokens where each sequence is one document: [B, min(num_global, S), H, Dh]."""
        first = [part[..., : self.spec.num_global, :, :] for part in rotary]
        q = rope(self._heads(self.global_q(x[:, : self.spec.num_global])), *first)
        if self.spec.causal:  # they see each other
            k, v = self._global(x[:, : self.spec.num_global], (first[0], first[1]))
            return attend(q, k, v, scale=self.scale)
        k, v = self._global(x, rotary)
        return attend(q, k, v, FULL, scale=self.scale)

    def _packed_rows(self, x: Tensor, mixed: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """`mixed` with the outputs of every document's first tokens replaced by those of the global projections."""
        rows = context.positions < self.spec.num_global
        ids = context.document_ids
        asked = _data(torch.where(rows, ids, -1))
        mask = Mask(_document_causal if self.spec.causal else _document, (), asked, _data(ids))
        k, v = self._global(x, rotary)
        far = attend(rope(self._heads(self.global_q(x)), *rotary), k, v, mask, scale=self.scale)
        return torch.where(rows[..., None, None], far, mixed)

    def _decode(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        """Attention of new tokens after those in `carry`: [B, n, H, Dh]."""
        spec, start, new = self.spec, context.start, x.shape[1]
        if not spec.causal:
            context.must_be_whole("longformer with encoder: true")
        known = context.carry.get(self.layer) or Seen(*[k[:, :0]] * 4)
        k, v = torch.cat((known.k, k), 1), torch.cat((known.v, v), 1)
        count, end = k.shape[1], start + new
        heads = min(spec.num_global, end)  # global tokens among the keys, the first of them
        place = torch.arange(count, device=x.device)
        place = torch.where(place < heads, place, place + end - count)
        query = torch.arange(start, end, device=x.device)[:, None]
        seen = (place <= query) & ((query - place < spec.window) | (place < spec.num_global))
        mixed = sdpa(q, k, v, seen, self.scale)
        far_k, far_v = known.far_k[:, :0], known.far_v[:, :0]
        if start < spec.num_global:
            rows = min(spec.num_global, end) - start
            first = (rotary[0][..., :rows, :, :], rotary[1][..., :rows, :, :])
            fresh = self._global(x[:, :rows], first)
            far_k, far_v = (torch.cat(pair, 1) for pair in zip((known.far_k, known.far_v), fresh))
            far_q = rope(self._heads(self.global_q(x[:, :rows])), *first)
            mixed = torch.cat((context.attend_joined(far_q, far_k, far_v, scale=self.scale), mixed[:, rows:]), 1)
        tail = min(spec.window - 1, end - heads)
        done = end >= spec.num_global
        context.carry[self.layer] = Seen(
            *(torch.cat((part[:, :heads], part[:, count - tail :]), 1) for part in (k, v)),
            *(part[:, :0] if done else part for part in (far_k, far_v)),
        )
        return mixed


def _data(numbers: Tensor) -> Tensor:
    return numbers.to(torch.int32)[:, None]


# Mask rules. A query's data is its document's number n; a key's is n (params[2] = 1), or 2 n and for a global key 2 n + 1.


def _two_sided(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    near = (q - k <= params[0]) & (k - q <= params[1])
    return (near | (k_data % params[2] == 1)) & (k_data // params[2] == q_data)


def _causal(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & ((q - k <= params[0]) | (k_data % params[2] == 1)) & (k_data // params[2] == q_data)


def _document(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return k_data == q_data


def _document_causal(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & (k_data == q_data)
