"""The collectives of the ranks that share the layers of a model, and the transfers between pipeline stages."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.parallel.one_shot import OneShot
from hone.parallel.place import Place


class Group:
    """The tensor-parallel ranks of one stage: sums and concatenations of their tensors, of one shape and dtype.

    Every rank calls the same methods in the same order, and all get the same bits. On GPUs messages up to
    `one_shot.max_bytes` are summed by an own kernel over peer memory (`OneShot`), larger ones by NCCL; both may be captured
    in a CUDA graph. On CPUs gloo brings every rank's tensor to all, which add them in the order of the ranks in float32.
    """

    def __init__(self, place: Place, group: Any = None, one_shot: OneShot | None = None) -> None:
        self.rank, self.size = place.tensor_rank, place.tensor_size
        self.group = group
        self.one_shot = one_shot

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x; x itself may be overwritten."""
        if self.size == 1:
            return x
        if x.is_cuda:
            if self.one_shot is not None and self.one_shot.takes(x):
                return self.one_shot.all_reduce(x)
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        parts = self._parts(x)
        total = parts[0].float() if x.dtype in (torch.bfloat16, torch.float16) else parts[0]
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [..., N] side by side: [..., size * N]."""
        if self.size == 1:
            return x
        if not x.is_cuda:
            return torch.cat(self._parts(x), -1)
        x = x.contiguous()
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(found.view(-1), x.view(-1), group=self.group)
        return found.movedim(0, -2).flatten(-2)

    def _parts(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts


class Pipe:
    """The way of hidden states from each pipeline stage to the next, between ranks with equal tensor-parallel rank.

    `group` holds all processes. A GPU sends in the order of its stream, without waiting; a CPU keeps what it sends until
    the next stage has taken it.
    """

    _KEPT = 8

    def __init__(self, place: Place, group: Any = None) -> None:
        self.place, self.group = place, group
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Sends x to the next stage."""
        x, to = x.contiguous(), self.place.rank + self.place.tensor_size
        if x.is_cuda:
            dist.send(x, to, group=self.group)
            return
        self._sent.append((dist.isend(x, to, group=self.group), x))
        while len(self._sent) > self._KEPT:
            self._sent.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """What the previous stage sent, of this shape, with the dtype and on the device of `like`."""
        x = torch.empty(shape, dtype=like.dtype, device=like.device)
        dist.recv(x, self.place.rank - self.place.tensor_size, group=self.group)
        return x
