"""LongNet: dilated attention, segments of growing length at growing strides, joined by their softmax denominators.

Legend: B batch, G segments of a branch, w a branch's segment length, r its stride, T = w / r tokens of it that a head
takes, H heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.cost.dims import Widths
from hone.model.block import Placement
from hone.model.context import Context
from hone.model.mixers.attention import GroupedHeads, GroupedHeadsLayer
from hone.model.rope import Rope
from hone.ops import attend, merge
from hone.ops.attention.masks import CAUSAL, FULL, Mask


class LongNet(GroupedHeads):
    """Dilated attention in segments, branches joined by softmax denominators. Ding et al. 2023, arXiv:2307.02486.

    A branch cuts the sequence into segments. Within a segment a head attends among every r-th token, from its key
    head's index mod r on; a token that a head skips in a branch gets no output from it. A pair in two branches counts
    twice, as in the paper. Gradients flow through the weights of the branches.
    """

    paper: ClassVar[str] = "arXiv:2307.02486"
    complexity: ClassVar[str] = "O(S sum(segment / dilation))"

    segments: tuple[int, ...] = Field(
        (2048, 4096, 8192, 16384, 32768), description="Each branch's segment length, in tokens."
    )
    dilations: tuple[int, ...] = Field((1, 2, 4, 8, 16), description="Each branch's stride; one of them is 1.")
    encoder: bool = Field(False, description="Whether tokens attend to later tokens of a segment too.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @model_validator(mode="after")
    def _branches_fit(self) -> LongNet:
        if len(self.segments) != len(self.dilations):
            raise ValueError(
                f"{len(self.segments)} segments and {len(self.dilations)} dilations: give equally many of each"
            )
        for length, stride in self.branches:
            if stride < 1 or length < 1 or length % stride:
                raise ValueError(f"dilation {stride} does not divide segment {length}")
        if 1 not in self.dilations:
            raise ValueError("no dilation is 1: some tokens would attend to nothing")
        return self

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return not self.encoder

    @property
    def branches(self) -> list[tuple[int, int]]:
        """(segment length, stride) of each branch."""
        return list(zip(self.segments, self.dilations))

    def mixing_flops(self, seq_len: int) -> float:
        """One query in r, which attends to one key in r of its segment."""
        seen = 0.0
        for length, stride in self.branches:
            taken = min(length, seq_len) / stride
            seen += (taken if self.encoder else (taken + 1) / 2) / stride
        return 4.0 * self.num_heads * self.head_dim * seen

    def state_values(self, seq_len: int) -> float:
        """Keys and values that the heads select from each branch's current segment."""
        kept = sum(seq_len % length // stride + seq_len % length % stride for length, stride in self.branches)
        return 2.0 * self.num_kv_heads * self.head_dim * kept

    def widths(self, hidden_size: int) -> Widths:
        plain = super().widths(hidden_size)
        return plain._replace(extra=plain.extra + len(self.segments) * plain.mixed)

    def build(self, place: Placement) -> LongNetLayer:
        return LongNetLayer(self, place)


class Branch(NamedTuple):
    """Decoding state of a branch's current segment: what the heads selected from every whole stride [B, t, KV, Dh], and
    the tokens after the last whole stride [B, < r, KV, Dh]."""

    k: Tensor
    v: Tensor
    rest_k: Tensor
    rest_v: Tensor


class LongNetLayer(GroupedHeadsLayer):
    """The module behind `LongNet`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        q, k, v = self.rotated_qkv(x, context)
        if context.carry is None:
            parts = [self._branch(q, k, v, *branch, context.document_ids) for branch in spec.branches]
        else:
            if spec.encoder:
                context.must_be_whole("longnet with encoder: true")
            known = context.carry.get(self.layer) or [Branch(*[k[:, :0]] * 4)] * len(spec.branches)
            steps = [self._step(q, k, v, *branch, kept, context.start) for branch, kept in zip(spec.branches, known)]
            parts = [part for part, _ in steps]
            context.carry[self.layer] = [kept for _, kept in steps]
        return self.out(merge(parts)[0].flatten(-2))

    def _offsets(self, num_heads: int, stride: int, device: torch.device) -> Tensor:
        """First token of each of `num_heads` heads: its key head's index mod r."""
        share = num_heads // self.spec.num_kv_heads
        return torch.arange(num_heads, device=device) // share % stride

    def _take(self, x: Tensor, stride: int) -> Tensor:
        """The tokens of x [N, w, heads, ...] that each head selects: [N, w / r, heads, ...]."""
        heads = torch.arange(x.shape[2], device=x.device)
        return x.unflatten(1, (-1, stride))[:, :, self._offsets(x.shape[2], stride, x.device), heads]

    def _branch(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, stride: int, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One branch of whole sequences: out [B, S, H, Dh], lse [B, H, S], which is -inf where a head skips a token."""
        batch, seq_len, num_heads, head_dim = q.shape
        length = min(length, -(-seq_len // stride) * stride)
        rest = -seq_len % length
        padded = [F.pad(part, (0, 0, 0, 0, 0, rest)) if rest else part for part in (q, k, v)]
        taken = [self._take(part.reshape(-1, length, *part.shape[2:]), stride) for part in padded]
        mask = CAUSAL if not self.spec.encoder else FULL
        if ids is not None or (self.spec.encoder and rest):
            mask = self._apart(ids, batch, seq_len, rest, length, stride, num_heads, q.device)
        out, lse = attend(*taken, mask, scale=self.scale, return_lse=True)
        places, heads = self._offsets(num_heads, stride, q.device), torch.arange(num_heads, device=q.device)
        scattered = out.new_zeros(len(out), out.shape[1], stride, num_heads, head_dim)
        scattered[:, :, places, heads] = out
        sums = lse.new_full((len(out), out.shape[1], stride, num_heads), float("-inf"))
        sums[:, :, places, heads] = lse.transpose(1, 2)
        out = scattered.reshape(batch, -1, num_heads, head_dim)[:, :seq_len]
        return out, sums.reshape(batch, -1, num_heads)[:, :seq_len].transpose(1, 2)

    def _apart(
        self, ids: Tensor | None, batch: int, seq_len: int, rest: int, length: int, stride: int, num_heads: int,
        device: torch.device,
    ) -> Mask:  # fmt: skip
        """The mask between documents, and for padding, among the tokens that each head selects from each segment."""
        if ids is None:
            ids = torch.zeros(batch, seq_len, dtype=torch.int64, device=device)
        ids = F.pad(ids + 1, (0, rest)).reshape(-1, length, 1).expand(-1, -1, num_heads)
        data = self._take(ids, stride).transpose(1, 2).to(torch.int32).contiguous()
        return Mask(_same if self.spec.encoder else _same_causal, (), data, data)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, stride: int, kept: Branch, start: int
    ) -> tuple[tuple[Tensor, Tensor], Branch]:
        """One branch of new tokens after `kept`, cut where its segments end."""
        outs, sums, at = [], [], start
        while at < start + q.shape[1]:
            if at % length == 0:
                kept = Branch(*(part[:, :0] for part in kept))
            new = min(length - at % length, start + q.shape[1] - at)
            part = slice(at - start, at - start + new)
            (out, lse), kept = self._piece(q[:, part], k[:, part], v[:, part], stride, kept, at % length)
            outs.append(out)
            sums.append(lse)
            at += new
        if at % length == 0:
            kept = Branch(*(part[:, :0] for part in kept))
        return (torch.cat(outs, 1), torch.cat(sums, 2)), kept

    def _piece(
        self, q: Tensor, k: Tensor, v: Tensor, stride: int, kept: Branch, at: int
    ) -> tuple[tuple[Tensor, Tensor], Branch]:
        """New tokens within one segment, the first at position `at` of it: ((out, lse), new state)."""
        rest_k, rest_v = torch.cat((kept.rest_k, k), 1), torch.cat((kept.rest_v, v), 1)
        whole, short = rest_k.shape[1] // stride, -rest_k.shape[1] % stride
        taken = [self._take(F.pad(rest, (0, 0, 0, 0, 0, short)), stride) for rest in (rest_k, rest_v)]
        keys, values = torch.cat((kept.k, taken[0]), 1), torch.cat((kept.v, taken[1]), 1)
        offsets = self._offsets(q.shape[2], stride, q.device)[:, None]
        place = torch.arange(at, at + q.shape[1], device=q.device)
        asking = torch.where(place % stride == offsets, place, -1).to(torch.int32)[None]
        there = (torch.arange(keys.shape[1], device=q.device) * stride + offsets).to(torch.int32)[None]
        mask = Mask(_not_after, (), asking, there)
        parts = attend(q, keys, values, mask, scale=self.scale, return_lse=True)
        done = slice(whole * stride, None)
        kept = Branch(
            keys[:, : kept.k.shape[1] + whole], values[:, : kept.k.shape[1] + whole], rest_k[:, done], rest_v[:, done]
        )
        return parts, kept


# Mask rules: by document numbers, and by positions in a segment.


def _same(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return q_data == k_data


def _same_causal(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & (q_data == k_data)


def _not_after(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return q_data >= k_data
