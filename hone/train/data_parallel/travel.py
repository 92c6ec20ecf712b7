"""How the weights and gradients of a bucket travel between the ranks that each hold a part of them: as they are, or in a few bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.cost.train.replicas import BLOCK
from hone.ops import widen
from hone.parallel.axis import Axis, Transfer
from hone.parallel.grid import Grid
from hone.train.data_parallel.flat import Flat, WeightRange
from hone.train.data_parallel.moves import Moves
from hone.train.data_parallel.sums import Handle


def encoded(values: Tensor, bits: int) -> Tensor:
    """Float32 `values` [..., N] in signed integers of `bits` (4 or 8), a scale for each block of 256: uint8 [..., bytes].

    The scale is the block's largest size divided by 127 or 7, in float32; values are rounded to the nearest multiple. First
    the codes lie there, two of 4 bits in a byte, then the scales. N must be a multiple of 256. Not finite values stay so.
    """
    top = 2 ** (bits - 1) - 1
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / top
    codes = (blocks / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-top, top).nan_to_num_().add_(top + 1)
    codes = codes.to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat([codes, scales.flatten(-2).contiguous().view(torch.uint8)], -1)


def decoded(message: Tensor, bits: int) -> Tensor:
    """The float32 values [..., N] of `message` [..., bytes], which `encoded` made."""
    count = num_values(message.shape[-1], bits)
    codes, scales = message.split([count * bits // 8, 4 * count // BLOCK], -1)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    blocks = codes.unflatten(-1, (-1, BLOCK)).float().sub_(2 ** (bits - 1))
    return blocks.mul_(scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2)


def num_values(num_bytes: int, bits: int) -> int:
    """The values of a message of `num_bytes`."""
    return num_bytes * BLOCK // (BLOCK * bits // 8 + 4)


class Travel:
    """The way of weights and gradients between the ranks of `shard`, those of `grid.copies` or `grid.expert_copies`, as `moves` says of
    the first. Every rank makes it at the same time.

    Wang et al. 2023, arXiv:2306.10209: weights in blocks of 8 bits (section 3.1), a second copy divided among neighbours only
    (3.2), gradients in few bits by all-to-alls, first between neighbours, then between their groups (3.3).
    """

    def __init__(self, grid: Grid, moves: Moves, shard: Axis | None = None) -> None:
        self.shard = shard or grid.copies.shard
        stays = moves.within == 1 or self.shard is grid.copies.shard
        self.moves = moves if stays else moves._replace(within=self.shard.size)
        self.inner: Axis | None = None
        """Neighbours that hold a second copy of the weights together; None: there is none."""
        self.outer: Axis | None = None
        """The ranks in the same place of the other groups of neighbours."""
        if self.shard is grid.copies.shard and 1 < moves.within < self.shard.size:
            self.inner, self.outer = grid.split(moves.within)

    def own(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """What other ranks gather of a slice `master` (float32)."""
        return encoded(master, self.moves.weight_bits) if self.moves.weight_bits else master.to(dtype, copy=True)

    def gather(self, weights: Tensor, own: Tensor) -> Handle | None:
        """Starts to write all ranks' slices into `weights`; `own` is that of this rank, as `own` makes it."""
        if not self.moves.weight_bits:
            return self.shard.all_gather(weights, own)
        room = own.new_empty(self.shard.size, *own.shape)
        return _Decoding(self.shard.all_gather(room.view(-1), own), room, weights, self.moves.weight_bits)

    def reduce(self, whole: Tensor) -> Reducing:
        """Starts the sum of every rank's float32 `whole` [ranks * N], which may be overwritten."""
        return Reducing(self, whole)

    def reduce_apart(self, flat: Flat, gradients: Mapping[str, Tensor]) -> ReducingApart:
        """Starts the sum of every rank's `gradients` of all weights of `flat`, contiguous and of one dtype of 16 bits."""
        return ReducingApart(self.shard, flat, gradients)


class _Decoding:
    def __init__(self, moving: Transfer | None, room: Tensor, weights: Tensor, bits: int) -> None:
        self._moving, self._room, self._weights, self._bits = moving, room, weights, bits

    def wait(self) -> None:
        if self._moving is not None:
            self._moving.wait()
        for message, values in zip(self._room, self._weights.view(len(self._room), -1), strict=True):
            values.copy_(decoded(message, self._bits))


class Reducing:
    """A sum of float32 gradients under way, of which each rank gets its slice, in float32: by the backend, or in a few bits."""

    def __init__(self, travel: Travel, whole: Tensor) -> None:
        self._travel, axis = travel, travel.shard
        bits = travel.moves.gradient_bits
        self._moving: Transfer | None = None
        if axis.size == 1:
            self._part = whole
        elif not bits:
            self._part = whole.new_empty(len(whole) // axis.size)
            self._moving = axis.reduce_scatter(self._part, whole)
        elif travel.inner is None:
            self._start(axis, encoded(whole.view(axis.size, -1), bits))
        else:  # to each neighbour the slices of all ranks in its place
            places = whole.view(-1, travel.inner.size, len(whole) // axis.size).transpose(0, 1)
            self._start(travel.inner, encoded(places, bits))

    def _start(self, axis: Axis, messages: Tensor) -> None:
        self._part = torch.empty_like(messages)
        self._moving = axis.all_to_all(self._part.view(axis.size, -1), messages.view(axis.size, -1))

    def part(self) -> Tensor:
        """This rank's slice of the sum, float32 [N]; every rank asks in the same order."""
        bits, outer = self._travel.moves.gradient_bits, self._travel.outer
        self._wait()
        if bits and self._travel.shard.size > 1:
            self._part = decoded(self._part, bits).sum(0)
            if outer is not None:
                self._start(outer, encoded(self._part, bits))
                self._wait()
                self._part = decoded(self._part, bits).sum(0)
        return self._part

    def _wait(self) -> None:
        if self._moving is not None:
            self._moving.wait()
            self._moving = None


class ReducingApart:
    """A sum of gradients of 16 bits under way, of which each rank gets its slice, in float32.

    A rank sends the pieces that another one holds from where the backward pass left them, without a copy, and adds up what comes for its
    own, in float32 and in the order of the ranks: the sum of the widened gradients for half of their bytes.
    """

    def __init__(self, axis: Axis, flat: Flat, gradients: Mapping[str, Tensor]) -> None:
        self._axis, self._flat, self._gradients = axis, flat, gradients
        self._own = flat.ranges(axis.index)
        like, others = next(iter(gradients.values())), [rank for rank in range(axis.size) if rank != axis.index]
        self._came = {rank: like.new_empty(flat.slice_size) for rank in others}
        given = [[self._piece(one) for one in flat.ranges(rank)] if rank in others else [] for rank in range(axis.size)]
        taken = [
            [self._came[rank][one.at : one.at + one.stop - one.start] for one in self._own] if rank in others else []
            for rank in range(axis.size)
        ]
        self._moving = axis.trade(taken, given)

    def _piece(self, piece: WeightRange) -> Tensor:
        return self._gradients[piece.name].view(-1)[piece.start : piece.stop]

    def part(self) -> Tensor:
        """As `Reducing.part`."""
        if self._moving is not None:
            self._moving.wait()
        total = torch.empty(self._flat.slice_size, device=next(iter(self._came.values())).device)
        end = 0
        for piece in sorted(self._own, key=lambda one: one.at):
            total[end : piece.at].zero_()  # padding
            end = piece.at + piece.stop - piece.start
            first, second, *rest = (
                self._piece(piece) if rank == self._axis.index else self._came[rank][piece.at : end]
                for rank in range(self._axis.size)
            )
            widen(total[piece.at : end], first, second)
            for one in rest:
                widen(total[piece.at : end], one, add=True)
        total[end:].zero_()
        return total
