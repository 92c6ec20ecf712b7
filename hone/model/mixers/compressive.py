"""Compressive Transformer: tokens that leave Transformer-XL's memory are compressed by a convolution into a second memory.

A segment attends to itself, to the `memory` tokens before it, and to `compressed` slots of `ratio` tokens each before
those. The convolution has a loss of its own, the difference between attention to the slots and attention to their
tokens. The language model's loss has no gradient for the convolution, and this loss has none for other weights. Legend:
as in transformer_xl; N compressed slots of a sequence, c the ratio.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.cost.dims import Widths
from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, Piece
from hone.model.mixers.transformer_xl import (
    TransformerXL,
    TransformerXLLayer,
    before,
    cut,
    segments,
    visible,
)


class Compressive(TransformerXL):
    """Transformer-XL with a second memory of compressed tokens, trained to keep attention. Rae et al. 2019, arXiv:1911.05507.

    Reach: segment + memory + ratio x compressed tokens, at segment + memory + compressed keys. No token attends
    to a slot that spans two documents.
    """

    paper: ClassVar[str] = "arXiv:1911.05507"
    complexity: ClassVar[str] = "O(S (segment + memory + compressed))"
    splits: ClassVar[tuple[str, ...]] = ()  # each rank would train the compression on its own heads alone

    compressed: int = Field(128, gt=0, description="Slots of the compressed memory.")
    ratio: int = Field(4, gt=1, description="Tokens that become one slot.")
    loss_weight: float = Field(1.0, gt=0, description="Weight of the loss that trains the compression.")

    @model_validator(mode="after")
    def _slots_fit(self) -> Compressive:
        if self.segment % self.ratio or self.memory % self.ratio:
            raise ValueError(f"ratio {self.ratio} does not divide segment {self.segment} and memory {self.memory}")
        if self.memory < self.segment:
            raise ValueError(f"memory {self.memory} is shorter than a segment of {self.segment}")
        return self

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """A convolution whose stride is its width: one product with `ratio` concatenated tokens.

        Queries, keys and values are projected from tokens and from slots, so no scale can be folded into their input.
        """
        qkv, *others = super().linears(hidden_size)
        compress = LinearSpec(
            "compress", self.ratio * hidden_size, (Piece("compress", hidden_size),),
            reads=Computed("mixer.token_groups"), bias=True, share=1 / self.ratio,
        )  # fmt: skip
        return (replace(qkv, reads=Computed("mixer.tokens_and_slots")), *others, compress)

    def mixing_flops(self, seq_len: int) -> float:
        """Scores and sums over memory, segment and slots, and the slots' own keys and values."""
        slots = min(self.compressed, max(0, seq_len - self.memory) // self.ratio)
        return super().mixing_flops(seq_len) + 6.0 * self.num_heads * self.head_dim * slots

    def state_values(self, seq_len: int) -> float:
        """Keys and values of memory, current segment and slots (future ones included), and tokens not compressed yet."""
        at_segment = seq_len - seq_len % self.segment
        first = max(0, (at_segment - self.memory) // self.ratio - self.compressed)
        slots = seq_len // self.ratio - first
        tokens = min(seq_len, self.memory + seq_len % self.segment)
        return float(self.num_heads * self.head_dim * (2 * (tokens + slots) + seq_len % self.ratio))

    def widths(self, hidden_size: int) -> Widths:
        plain = super().widths(hidden_size)
        return plain._replace(extra=plain.extra + 4 * self.num_heads * self.compressed + 2 * hidden_size)

    def build(self, place: Placement) -> CompressiveLayer:
        return CompressiveLayer(self, place)


class Memories(NamedTuple):
    """Decoding state: keys and values [B, m, H, Dh] of tokens and of slots, the tokens [B, < ratio, D] of the next
    slot, and the index of the first slot kept."""

    k: Tensor
    v: Tensor
    slot_k: Tensor
    slot_v: Tensor
    rest: Tensor
    first: int


class CompressiveLayer(TransformerXLLayer):
    """The module behind `Compressive`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if context.carry is not None:
            return self.out(self._decode(x, context).flatten(-2))
        spec, seq_len = self.spec, x.shape[1]
        q, k, v = self._heads(self.qkv(x))
        known_k, known_v = k, v
        if torch.is_grad_enabled():
            _, known_k, known_v = self._heads(self.qkv(x.detach()))
        slots = self._slots(x.detach())
        self._learn(x.detach(), slots, context)
        segment = min(spec.segment, seq_len)
        reach = spec.memory if seq_len > segment else 0
        own_q, own_k, own_v = (segments(part, segment) for part in (q, k, v))
        count = own_q.shape[1]
        keys = [before(known_k, segment, reach, count), own_k]
        values = [before(known_v, segment, reach, count), own_v]
        seen = visible(seq_len, segment, reach, context.document_ids, x.device)
        if (count - 1) * segment > spec.memory:  # the last segment's memory has a past
            _, slot_k, slot_v = self._heads(self.qkv(slots.detach()))
            keys, values = [self._past(slot_k, count), *keys], [self._past(slot_v, count), *values]
            past = self._past_seen(count, context.document_ids, x.device)
            seen = torch.cat((past.expand(*seen.shape[:-1], -1), seen), -1)
        mixed = self.attend(own_q, torch.cat(keys, 2), torch.cat(values, 2), seen)
        return self.out(mixed.flatten(1, 2)[:, :seq_len].flatten(-2))

    def _slots(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S // c, D]: every c tokens as one."""
        whole = x.shape[1] // self.spec.ratio * self.spec.ratio
        return self.compress(x[:, :whole].unflatten(1, (-1, self.spec.ratio)).flatten(2))

    def _past(self, slots: Tensor, count: int) -> Tensor:
        """The slots that each segment attends to, those before its memory: [B, N, ...] -> [B, G, compressed, ...]."""
        spec = self.spec
        late = F.pad(slots, (0, 0) * (slots.dim() - 2) + (spec.memory // spec.ratio, 0))
        return before(late, spec.segment // spec.ratio, spec.compressed, count)

    def _past_seen(self, count: int, ids: Tensor | None, device: torch.device) -> Tensor:
        """Which of them a token attends to: bool [B or 1, G, 1, L or 1, compressed]."""
        spec = self.spec
        there = (torch.arange(count, device=device) * spec.segment - spec.memory) // spec.ratio
        line = torch.arange(spec.compressed, device=device)
        seen = (line >= spec.compressed - there[:, None])[None, :, None, None]
        if ids is None:
            return seen
        whole = ids.shape[1] // spec.ratio * spec.ratio
        first, last = ids[:, : whole : spec.ratio], ids[:, spec.ratio - 1 : whole : spec.ratio]
        slots = self._past(torch.where(first == last, first + 1, 0), count)
        return seen & (segments(ids + 1, spec.segment)[..., :, None] == slots[..., None, :])[:, :, None]

    def _learn(self, x: Tensor, slots: Tensor, context: Context) -> None:
        """The attention-reconstruction loss of the tokens that leave the memory at each segment's end."""
        learning = any(parameter.requires_grad for parameter in self.compress.parameters())  # quantized ones do not
        if not (learning and torch.is_grad_enabled()):
            return None
        spec = self.spec
        begin, end = -(-spec.memory // spec.segment), x.shape[1] // spec.segment
        if end <= begin:  # no token leaves the memory, but a trained parameter must have a gradient
            return context.add_loss(0.0 * sum(part.sum() for part in self.compress.parameters()))
        qkv = self.qkv.weight.detach()
        q, k, v = self._heads(F.linear(x, qkv))
        _, slot_k, slot_v = self._heads(F.linear(slots, qkv))
        q = segments(q[:, : end * spec.segment], spec.segment)
        exact, brief = (
            self._content(q, *(self._leaving(part, width, end) for part in both))[:, begin:]
            for both, width in (((k, v), spec.segment), ((slot_k, slot_v), spec.segment // spec.ratio))
        )
        return context.add_loss(spec.loss_weight * F.mse_loss(brief.float(), exact.detach().float()))

    def _leaving(self, part: Tensor, width: int, count: int) -> Tensor:
        """The `width` tokens that leave the memory at the end of each segment: [B, .., H, Dh] -> [B, count, width, H, Dh]."""
        late = (self.spec.memory - self.spec.segment) * width // self.spec.segment
        return before(F.pad(part, (0, 0, 0, 0, late, 0)), width, width, count)

    def _content(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by content alone, to every key; axes [B, G, n, H, Dh]."""
        weights = (torch.einsum("bgnhd,bgkhd->bghnk", q, k) * self.spec.head_dim**-0.5).softmax(-1)
        return torch.einsum("bghnk,bgkhd->bgnhd", weights, v)

    def _decode(self, x: Tensor, context: Context) -> Tensor:
        """Attention of new tokens after those in `carry`: [B, n, H, Dh], computed segment by segment."""
        spec = self.spec
        q, k, v = self._heads(self.qkv(x))
        known = context.carry.get(self.layer) or Memories(k[:, :0], v[:, :0], k[:, :0], v[:, :0], x[:, :0], 0)
        mixed, at = [], context.start
        for part_q, part_k, part_v, part_x in zip(*(cut(part, at, spec.segment) for part in (q, k, v, x))):
            new, past = part_q.shape[1], max(0, (at - at % spec.segment - spec.memory) // spec.ratio)
            known = self._forget(known, at)
            known = known._replace(k=torch.cat((known.k, part_k), 1), v=torch.cat((known.v, part_v), 1))
            slots = slice(0, past - known.first)
            keys = torch.cat((known.slot_k[:, slots], known.k), 1)
            values = torch.cat((known.slot_v[:, slots], known.v), 1)
            count = keys.shape[1]
            seen = torch.ones(new, count, dtype=torch.bool, device=x.device).tril(count - new)
            mixed.append(self.attend(part_q[:, None], keys[:, None], values[:, None], seen)[:, 0])
            known, at = self._compressed(known, part_x), at + new
        context.carry[self.layer] = self._forget(known, at)
        return torch.cat(mixed, 1)

    def _forget(self, known: Memories, at: int) -> Memories:
        """The memories without entries that tokens from position `at` on no longer attend to."""
        spec = self.spec
        begin = at - at % spec.segment
        first = max(0, (begin - spec.memory) // spec.ratio - spec.compressed)
        kept, drop = spec.memory + at - begin, first - known.first
        return Memories(
            known.k[:, -kept:], known.v[:, -kept:], known.slot_k[:, drop:], known.slot_v[:, drop:], known.rest, first
        )

    def _compressed(self, known: Memories, x: Tensor) -> Memories:
        """The memories with the new tokens x [B, n, D] compressed as far as they fill whole slots."""
        rest = torch.cat((known.rest, x), 1)
        whole = rest.shape[1] // self.spec.ratio * self.spec.ratio
        if not whole:
            return known._replace(rest=rest)
        _, slot_k, slot_v = self._heads(self.qkv(self._slots(rest[:, :whole])))
        return known._replace(
            slot_k=torch.cat((known.slot_k, slot_k), 1),
            slot_v=torch.cat((known.slot_v, slot_v), 1),
            rest=rest[:, whole:],
        )
