"""Rows of experts by the copy engines of the GPUs of one host: they take no multiprocessors from what is computed beside.

A rank copies each other one's piece of its rows into that one's memory, by `hone.parallel.peer_copies.Memory`: rooms of two calls in turn, whose
places are as large as the most rows that a rank sends, and a number after each piece for which the other's stream waits.
A call ends before the next one begins: rows that return are made of rows that came. So two rooms suffice. Rows that nobody keeps (`Carrier`)
are used where they came, as long as all pieces are as large as their rooms: the next call begins after their use, and no room is written
before the call after that. Others are copied out of it.
Legend: R rows of this rank, S rows for its experts, D width, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.parallel.axis import Axis
from hone.parallel.experts import Messages, RowExchange, Sizes
from hone.parallel.peer_copies import Memory, gpu_memory

_KIND, _TURNS = 0, 2


def exchange_of(axis: Axis, device: torch.device | str, backend: str) -> tuple[RowExchange, Any]:
    """The exchange of rows on `device` along `axis`, and a function that ends it; every rank of the axis calls this.

    `backend`: 'standard', the process group's collectives; 'peer_copies', copies of GPUs of one host into each other's memory. Raises
    SpecError where these cannot be made.
    """
    if backend == "standard":
        return RowExchange(axis, Messages(axis)), lambda broken: None
    fix = "set parallelism.expert_parallel_comm_backend: standard"
    if torch.device(device).type != "cuda":
        raise SpecError("expert_parallel_comm_backend peer_copies is between GPUs", fix=fix)
    memory = gpu_memory(axis, torch.device(device), asked="expert_parallel_comm_backend peer_copies", fix=fix, kinds=1)
    carrier = RowCopies(axis.index, axis.size, memory)
    return RowExchange(axis, carrier), carrier.close


class RowCopies:
    """`hone.parallel.experts.Carrier` of rank `index` of `size` through `memory`, which has rooms of one kind."""

    def __init__(self, index: int, size: int, memory: Memory) -> None:
        self._index, self._size, self._memory = index, size, memory
        self._calls = 0

    def start(self, rows: Tensor, sizes: Sizes, *, keeps: bool = True) -> _Copied:
        """As `Carrier.start`."""
        place = max(sizes.most, 1) * rows.shape[1] * rows.element_size()
        stays = not keeps and sizes.most > 0 and all(one == sizes.most for one in (*sizes.taken, *sizes.given))
        if self._memory.reserve(place):
            self._calls = 0
        self._calls += 1
        pieces = rows.split(sizes.given)
        for step in range(1, self._size):
            rank = (self._index + step) % self._size
            part = pieces[rank].reshape(-1).view(torch.uint8)
            self._memory.copy(rank, _KIND, self._calls % _TURNS, part, self._calls, place)
        if stays:
            part = pieces[self._index].reshape(-1).view(torch.uint8)
            self._memory.copy(self._index, _KIND, self._calls % _TURNS, part, None, place)
        taken = sizes.taken, place, self._calls
        return _Copied(self._memory, self._index, pieces, *taken, self._memory.mark(), stays=stays)

    def close(self, broken: bool) -> None:
        """The end of all calls; `broken`: a rank has failed, so that what others or this one wait for may never come."""
        if broken:
            self._memory.release()


class _Copied:
    """As `hone.parallel.experts.Flight`."""

    def __init__(
        self,
        memory: Memory,
        index: int,
        pieces: tuple[Tensor, ...],
        taken: list[int],
        place: int,
        call: int,
        sent: Callable[[], None],
        *,
        stays: bool,
    ) -> None:
        self._memory, self._index, self._pieces, self._taken = memory, index, pieces, taken
        self._place, self._call, self._sent, self._stays = place, call, sent, stays

    def land(self) -> Tensor:
        """As `hone.parallel.experts.Flight.land`."""
        own, size = self._pieces[self._index], len(self._pieces)
        room = self._memory.room(_KIND, self._call % _TURNS, self._place).view(own.dtype).view(size, -1, own.shape[1])
        for step in range(1, size):
            self._memory.wait((self._index - step) % size, _KIND, self._call)
        if self._stays:
            self._sent()  # this rank's own rows are there, too
            self._pieces = ()
            return room.flatten(0, 1)
        came = [own if rank == self._index else room[rank, :count] for rank, count in enumerate(self._taken)]
        found = torch.cat(came)
        self._sent()  # from here on the memory of the rows may be used again
        self._pieces = ()
        return found
