"""One axis of a grid of ranks: the ranks along it and their collectives over flat tensors, all started without waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.base.ranks import Lost, Waits

_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_PATIENCE = timedelta(seconds=1)
"""How long a rank waits on a CPU before it asks whether another one has failed."""

_MESSAGE = timedelta(seconds=30)
"""How long a rank waits for one message. gloo closes the connection then, so there is no second look: ranks must have met before."""


class Transfer:
    """A collective under way. Raises `Lost` where another rank has ended or failed."""

    def __init__(
        self,
        axis: Axis,
        collective: Callable[..., Any],
        *tensors: Tensor,
        then: Callable[[], Any] = lambda: None,
    ) -> None:
        self._said = f"rank {axis.ranks[axis.index]} lost one of the ranks {', '.join(map(str, axis.ranks))}"
        self._broken, self._on_gpu, self._then = axis.broken, tensors[0].is_cuda, then
        self._waits = axis.waits
        with self._losing():
            self._work = collective(*tensors, group=axis.group, async_op=True)

    def wait(self) -> None:
        """Returns when the result may be used: on a GPU, by what the current stream does next."""
        with self._losing(), self._waits.around(self._on_gpu):
            if self._on_gpu:
                self._work.wait()
                return
            while True:
                try:
                    self._work.wait(_PATIENCE)
                    break
                except RuntimeError as error:
                    if "timed out" not in str(error).lower() or self._broken():
                        raise
            self._then()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise Lost.of(self._said, error) from None


class Axis:
    """The ranks `ranks` in order, of which this is number `index`; `group` is their process group (None: it is alone).

    `broken` tells a rank that waits on a CPU whether another one has failed and will not come (`Mesh.broken`); `waits` counts how long it waits.

    Every rank of the axis calls the same methods in the same order. Each returns a handle whose `wait` returns when the
    result may be used (on a GPU: by the current stream), or None when there is nothing to wait for.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: Any = None,
        broken: Callable[[], bool] = lambda: False,
        waits: Waits | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.index, self.size = self.ranks.index(rank), len(self.ranks)
        self.group, self.broken, self.waits = group, broken, waits or Waits()
        self.patience = _MESSAGE
        self.sent: Counter[str] = Counter()
        """Bytes that this rank has sent by each collective, where sums and gathers go around a ring."""
        assert self.size == 1 or group is not None, "several ranks need a process group"

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """A copy of a module that holds an axis meets the same ranks: a process group has no copies."""
        return self

    def _count(self, collective: str, x: Tensor, times: int = 1) -> None:
        """Counts `times` a ring's part of x, the whole tensor of a collective."""
        self.sent[collective] += times * x.nbytes * (self.size - 1) // self.size

    def all_reduce(self, x: Tensor, *, largest: bool = False) -> Transfer | None:
        """Replaces x by the sum of every rank's x, or their `largest` elements: all get the same bits."""
        if self.size == 1:
            return None
        self._count("all_reduce", x, times=2)
        return Transfer(self, partial(dist.all_reduce, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM), x)

    def reduce_scatter(self, part: Tensor, x: Tensor) -> Transfer | None:
        """Writes into `part` [N] slice `index` of the sum of every rank's x [size * N]; x itself may be overwritten."""
        if self.size == 1:
            part.copy_(x)
            return None
        self._count("reduce_scatter", x)
        if not x.is_cuda:  # gloo does the same, but does not stop waiting
            mine = x[self.index * len(part) : (self.index + 1) * len(part)]
            return Transfer(self, dist.all_reduce, x, then=lambda: part.copy_(mine))
        return Transfer(self, _REDUCE_SCATTER, part, x)

    def all_to_all(self, x: Tensor, parts: Tensor) -> Transfer | None:
        """Slice i of `parts` [size, N] goes to rank i of the axis; slice i of x [size, N] is what rank i sent here."""
        if self.size == 1:
            x.copy_(parts)
            return None
        self._count("all_to_all", parts)
        return Transfer(self, dist.all_to_all_single, x.view(torch.uint8), parts.view(torch.uint8))

    def all_to_all_rows(self, x: Tensor, rows: Tensor, taken: Sequence[int], given: Sequence[int]) -> Transfer | None:
        """The first given[0] of `rows` [R, D] go to the first rank of the axis, and so on; x [S, D] is the taken[i] rows of each rank i.

        Contiguous; given sums to R and taken to S. Neither may be touched meanwhile.
        """
        if self.size == 1:
            x.copy_(rows)
            return None
        width = rows.shape[1] * rows.element_size()
        self.sent["all_to_all"] += (len(rows) - given[self.index]) * width
        taken, given = ([count * width for count in counts] for counts in (taken, given))
        send = partial(dist.all_to_all_single, output_split_sizes=taken, input_split_sizes=given)
        return Transfer(self, send, x.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8))

    def trade(self, taken: Sequence[Sequence[Tensor]], given: Sequence[Sequence[Tensor]]) -> Transfer | None:
        """Sends the tensors `given[i]` to rank i of the axis and fills those of `taken[i]` with what it sends here.

        Contiguous flat tensors; sizes and dtypes agree, and of this rank there are none. On a GPU they are sent from where they lie.
        """
        if self.size == 1:
            return None
        self.sent["all_to_all"] += sum(one.nbytes for tensors in given for one in tensors)
        if any(one.is_cuda for tensors in (*taken, *given) for one in tensors):
            messages = [
                dist.P2POp(way, one.view(torch.uint8), self.ranks[rank], self.group)
                for way, every in ((dist.isend, given), (dist.irecv, taken))
                for rank, tensors in enumerate(every)
                for one in tensors
            ]
            first = next(one for tensors in (*taken, *given) for one in tensors)
            return Transfer(self, lambda _, **options: _Together(dist.batch_isend_irecv(messages)), first)
        sent, room = (_joined(every) for every in (given, taken))
        sizes = [[sum(one.nbytes for one in tensors) for tensors in every] for every in (taken, given)]
        send = partial(dist.all_to_all_single, output_split_sizes=sizes[0], input_split_sizes=sizes[1])

        def scatter() -> None:
            every = [one.view(torch.uint8) for tensors in taken for one in tensors]
            for one, values in zip(every, room.split([len(one) for one in every]), strict=True):
                one.copy_(values)

        return Transfer(self, send, room, sent, then=scatter)

    def rotate(self, x: Tensor, part: Tensor) -> Transfer | None:
        """Sends `part` [N] to the next rank of the ring and receives x [N] of the one before; neither may be touched meanwhile."""
        if self.size == 1:
            x.copy_(part)
            return None
        self.sent["rotate"] += part.nbytes
        # Sends and receives alone would close gloo's connections when a rank has waited for `_PATIENCE`.
        following, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        x, part = x.view(torch.uint8), part.view(torch.uint8)
        taken, given = ([len(x) if rank == peer else 0 for rank in range(self.size)] for peer in (before, following))
        send = partial(dist.all_to_all_single, output_split_sizes=taken, input_split_sizes=given)
        return Transfer(self, send, x, part)

    def all_gather(self, x: Tensor, part: Tensor) -> Transfer | None:
        """Writes every rank's `part` [N] into x [size * N], in order; `part` may be slice `index` of x itself."""
        if self.size == 1:
            if part.data_ptr() != x.data_ptr():
                x.copy_(part)
            return None
        self._count("all_gather", x)
        # As bytes: gloo does not know every dtype.
        return Transfer(self, _ALL_GATHER, x.view(torch.uint8), part.view(torch.uint8))

    def exchange(self, to: int | None, x: Tensor | None, source: int | None, into: Tensor | None) -> None:
        """Sends x to number `to` of the axis and receives `into` from number `source`, both at once; either may be None.

        Contiguous tensors of any dtype; only the ranks concerned call it. Returns when both may be used (on a GPU: by the
        current stream). Raises `Lost` when the other rank ends, or sends nothing for `patience`.
        """
        self.sent["exchange"] += 0 if to is None or x is None else x.nbytes
        ways = ((dist.isend, to, x), (dist.irecv, source, into))
        messages = [
            dist.P2POp(way, tensor.view(torch.uint8), self.ranks[number], self.group)
            for way, number, tensor in ways
            if number is not None and tensor is not None and tensor.numel()
        ]
        try:
            under_way = dist.batch_isend_irecv(messages) if messages else ()
            with self.waits.around(any(one.tensor.is_cuda for one in messages)):
                for work in under_way:
                    work.wait(self.patience)
        except RuntimeError as error:
            raise Lost.of(f"rank {self.ranks[self.index]} lost one of the ranks {self.ranks}", error) from None


class _Together:
    """Several messages as one."""

    def __init__(self, under_way: Sequence[Any]) -> None:
        self._under_way = under_way

    def wait(self) -> None:
        for work in self._under_way:
            work.wait()


def _joined(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Their bytes, one after the other."""
    every = [one.view(torch.uint8) for some in tensors for one in some]
    return torch.cat(every) if every else torch.empty(0, dtype=torch.uint8)
