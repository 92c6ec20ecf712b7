"""Transformer-XL: attention within a segment and to a memory of earlier tokens, with relative positions.

The sequence is cut into segments of `segment` tokens. A token attends to its segment up to itself and to the `memory`
tokens before the segment. The memory's layer inputs are detached: gradients reach this layer's weights through them,
but not the layers below. Legend: B batch, G segments, L segment, M memory, K = M + L keys of a segment, H heads, Dh
head width, D hidden width.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hone.cost.dims import Widths
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import (
    Computed,
    LinearSpec,
    Parameter,
    ParameterSpec,
    Piece,
    grouped_pieces,
    projection_in,
    projection_out,
)
from hone.model.mixer import Mixer


class TransformerXL(Mixer):
    """Segments with a detached memory and exact relative positions. Dai et al. 2019, arXiv:1901.02860.

    Scores are (q + u) k + (q + v) r(i - j) with r a projection of sinusoids of the distance. Plain torch on every
    device: the second product has no fused kernel. Decoding keeps between `memory` and `memory + segment` tokens.
    """

    paper: ClassVar[str] = "arXiv:1901.02860"
    complexity: ClassVar[str] = "O(S (segment + memory))"
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    num_heads: int = Field(gt=0, description="Heads.")
    head_dim: int = Field(gt=0, description="Width of a head.")
    segment: int = Field(128, gt=0, description="Tokens of a segment.")
    memory: int = Field(128, gt=0, description="Tokens before a segment that it attends to.")

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """The encodings of distances are projected once per pass, not per token."""
        heads = self.num_heads
        distance = Piece("distance", heads * self.head_dim, heads)
        return (
            projection_in("qkv", hidden_size, *grouped_pieces(heads, heads, self.head_dim)),
            projection_in("distance", hidden_size, distance, reads=Computed("mixer.distances"), share=0.0),
            projection_out(hidden_size, heads, self.head_dim),
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """u and v of the paper."""
        shape = (self.num_heads, self.head_dim)
        return tuple(ParameterSpec(name, shape, heads=self.num_heads) for name in ("content_bias", "distance_bias"))

    def mixing_flops(self, seq_len: int) -> float:
        """Content scores, position scores and the weighted sum over all K keys of each segment."""
        return 6.0 * self.num_heads * self.head_dim * min(self.segment + self.memory, seq_len)

    def state_values(self, seq_len: int) -> float:
        """Keys and values of the memory and of the segment so far."""
        return 2.0 * self.num_heads * self.head_dim * min(seq_len, self.memory + seq_len % self.segment)

    def widths(self, hidden_size: int) -> Widths:
        """Queries, keys and values; keys and values again, gathered for their segment; a weight for every key of it."""
        inner = self.num_heads * self.head_dim
        gathered = 2 * inner * (self.segment + self.memory) // self.segment
        weights = self.num_heads * (self.segment + self.memory)
        return Widths(projected=3 * inner, turned=gathered, mixed=inner, extra=weights)

    def build(self, place: Placement) -> TransformerXLLayer:
        return TransformerXLLayer(self, place)


class Memory(NamedTuple):
    """Decoding state: keys and values [B, m, H, Dh] of the memory and of the current segment."""

    k: Tensor
    v: Tensor


class TransformerXLLayer(Block):
    """The module behind `TransformerXL`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if context.carry is not None:
            return self.out(self._decode(x, context).flatten(-2))
        spec = self.spec
        seq_len = x.shape[1]
        q, k, v = self._heads(self.qkv(x))
        known_k, known_v = k, v
        if torch.is_grad_enabled():
            _, known_k, known_v = self._heads(self.qkv(x.detach()))
        segment = min(spec.segment, seq_len)  # a sequence shorter than a segment needs no padding
        reach = spec.memory if seq_len > segment else 0
        own_q, own_k, own_v = (segments(part, segment) for part in (q, k, v))
        count = own_q.shape[1]
        keys = torch.cat((before(known_k, segment, reach, count), own_k), 2)
        values = torch.cat((before(known_v, segment, reach, count), own_v), 2)
        seen = visible(seq_len, segment, reach, context.document_ids, x.device)
        mixed = self.attend(own_q, keys, values, seen)
        return self.out(mixed.flatten(1, 2)[:, :seq_len].flatten(-2))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (-1, self.spec.head_dim)) for part in qkv.chunk(3, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Relative attention. q [B, G, n, H, Dh]; k, v [B, G, K, H, Dh]; seen bool [.., n, K] -> [B, G, n, H, Dh].

        The last query has the position of the last key; a key's distance is its number of positions before the query.
        """
        r = self.distance(sinusoids(k.shape[2], self.distance.in_features, q)).unflatten(-1, (-1, self.spec.head_dim))
        content = torch.einsum("bgnhd,bgkhd->bghnk", q + self.content_bias, k)
        by_distance = torch.einsum("bgnhd,khd->bghnk", q + self.distance_bias, r)
        scores = (content + shifted(by_distance)) * self.spec.head_dim**-0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        return torch.einsum("bghnk,bgkhd->bgnhd", weights, v)

    def _decode(self, x: Tensor, context: Context) -> Tensor:
        """Attention of new tokens after those in `carry`: [B, n, H, Dh], computed segment by segment."""
        spec = self.spec
        q, k, v = self._heads(self.qkv(x))
        known = context.carry.get(self.layer) or Memory(k[:, :0], v[:, :0])
        mixed, at = [], context.start
        for part_q, part_k, part_v in zip(*(cut(part, at, spec.segment) for part in (q, k, v))):
            new = part_q.shape[1]
            # At the start of a segment, keys before the memory are dropped.
            kept = spec.memory + at % spec.segment
            known = Memory(*(torch.cat((old[:, -kept:], part), 1) for old, part in zip(known, (part_k, part_v))))
            count = known.k.shape[1]
            seen = torch.ones(new, count, dtype=torch.bool, device=x.device).tril(count - new)
            mixed.append(self.attend(part_q[:, None], known.k[:, None], known.v[:, None], seen)[:, 0])
            at += new
        kept = spec.memory + at % spec.segment
        context.carry[self.layer] = Memory(known.k[:, -kept:], known.v[:, -kept:])
        return torch.cat(mixed, 1)


def cut(x: Tensor, start: int, segment: int) -> tuple[Tensor, ...]:
    """x [B, n, ...], whose first token has position `start`, cut where segments end."""
    first = min(segment - start % segment, x.shape[1])
    return x[:, :first], *(x[:, first:].split(segment, 1) if x.shape[1] > first else ())


def segments(x: Tensor, segment: int) -> Tensor:
    """x [B, S, ...] -> [B, G, L, ...], padded with zeros at the end."""
    rest = -x.shape[1] % segment
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, rest)) if rest else x
    return x.unflatten(1, (-1, segment))


def before(x: Tensor, segment: int, reach: int, count: int) -> Tensor:
    """The `reach` tokens before each of `count` segments: x [B, S, ...] -> [B, count, reach, ...], zeros before the first."""
    if not reach:
        return x.new_empty(x.shape[0], count, 0, *x.shape[2:])
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (reach, 0))
    return padded[:, : (count - 1) * segment + reach].unfold(1, reach, segment).movedim(-1, 2)


def visible(seq_len: int, segment: int, reach: int, ids: Tensor | None, device: torch.device) -> Tensor:
    """Which of a segment's `reach` + L keys its queries attend to: bool [B or 1, G, 1, L, reach + L].

    Padded queries have a key too, so that no row of scores is empty. `ids` [B, S] are document numbers.
    """
    count = -(-seq_len // segment)
    place = torch.arange(segment, device=device)[:, None] + reach
    line = torch.arange(reach + segment, device=device)
    seen = (line <= place)[None, None, None]
    absent = line < reach - segment * torch.arange(count, device=device)[:, None]  # before the row's beginning
    seen = seen & ~absent[None, :, None, None]
    if ids is not None:
        own = segments(ids + 1, segment)  # padding is document 0
        keys = torch.cat((before(ids + 1, segment, reach, count), own), 2)
        seen = seen & (own[..., :, None] == keys[..., None, :])[:, :, None]
    return seen


def sinusoids(count: int, width: int, like: Tensor) -> Tensor:
    """Encodings of the distances 0 ... count - 1: [count, width] in the dtype and on the device of `like`."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=like.device)
    angles = torch.arange(count, device=like.device)[:, None] / 10000.0 ** (steps / width)
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width].to(like.dtype)


def shifted(by_distance: Tensor) -> Tensor:
    """Scores by distance [..., n, K] (column d: distance d) as scores by key: column j holds distance i + K - n - j.

    Keys after the query, which have no distance, get arbitrary scores: they are masked.
    """
    new, known = by_distance.shape[-2:]
    padded = F.pad(
        by_distance.flip(-1), (1, 0)
    )  # column c + 1: distance K - 1 - c; a row more than it is wide shifts by one
    flat = padded.flatten(-2)[..., new:]
    return flat.unflatten(-1, (new, known))
