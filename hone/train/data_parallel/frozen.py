"""The frozen weights of a layer, beside adapters: their bytes are divided among ranks, and whole while the layer computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.parallel.grid import Copies
from hone.train.data_parallel.flat import Flat
from hone.train.data_parallel.sums import Handle
from hone.train.data_parallel.travel import Travel


class Frozen:
    """`tensors`, parameters and buffers of any dtype, become views of one flat tensor of bytes, of which this rank keeps a slice.

    They never change: they have neither masters nor gradients, and travel as they are, codes of quantized weights too. All ranks of
    `copies.shard` must have read the same ones. They are in memory between `gather` and `free` only.
    """

    def __init__(self, tensors: Mapping[str, Tensor], copies: Copies, travel: Travel) -> None:
        shapes = {name: (one.numel() * one.element_size(),) for name, one in tensors.items()}
        self._flat = Flat(shapes, copies.shard.size, whole=False)
        self._shard, self._travel = copies.shard, travel
        device = next(iter(tensors.values())).device
        self._bytes = torch.zeros(self._flat.size, dtype=torch.uint8, device=device)
        for name, one in tensors.items():
            view = self._flat.view(self._bytes, name).view(one.dtype).view(one.shape)
            view.copy_(one.detach())
            one.data = view
        self._own = self._flat.slice_of(self._bytes, copies.shard.index).clone()
        self._second: Tensor | None = None
        """This rank's part of the copy that neighbours hold together."""
        self._there = True
        self._gathering: Handle | None = None

    def gather(self) -> None:
        """Starts to bring the whole weights into memory."""
        if self._there:
            return
        self._bytes.untyped_storage().resize_(self._flat.size)
        inner = self._travel.inner
        if self._second is not None and inner is not None:
            self._gathering = inner.all_gather(self._bytes, self._second)
        else:
            self._gathering = self._shard.all_gather(self._bytes, self._own)
        self._there = True

    def ready(self) -> None:
        """Waits for the whole weights."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def leave(self) -> None:
        """After the forward pass: frees the whole weights, as `Bucket.leave` does."""
        if self._travel.moves.within == 1:
            return
        inner = self._travel.inner
        if inner is not None and self._second is None:
            self._second = self._bytes.chunk(inner.size)[inner.index].clone()
        self.free()

    def free(self) -> None:
        """Frees the whole weights."""
        if self._there:
            self.ready()
            self._bytes.untyped_storage().resize_(0)
            self._there = False
