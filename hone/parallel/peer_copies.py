"""Parts of tensors that GPUs of one host write into each other's memory by their copy engines, beside products that use the whole GPU.

NCCL's kernels need multiprocessors, and a product that fills the GPU leaves none: they wait until it has ended. A copy from one
GPU's memory into another's is done by a copy engine, and a stream can wait for a number in memory without a kernel. Multicast is not
used. Each of the n ranks has room for the parts of two calls of a kind, used in turn:

    rank 0, its stream    product of its own part ........ waits for 1's number, product of 1's part
    rank 0, copies        its part into 1's room, then the number of the call

A rank may write into the room of call k again in call k + 2: it has then waited for the other's number of call k + 1, which that one
sent after its own work of call k. So nobody asks whether room is free.

A stream waits for a number for as long as it takes, and its GPU's memory cannot be freed meanwhile. So where a rank fails, every rank
sends a number later than all others: the streams go on, with parts that nobody uses any more.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hone.base.errors import SpecError
from hone.parallel.axis import Axis

GATHER, SUM = range(2)
"""The kinds of calls; each has room of its own, because one of each may be under way."""

_TURNS = 2
"""Calls of a kind whose parts have room at once."""

_LATER = 1 << 30
"""So far beyond the last number is the one that ends all waits; numbers are compared by the sign of their difference in 32 bits."""


class Memory(Protocol):
    """What ranks can write of each other. `kind` and `turn` name the room, `rank` whose it is."""

    def reserve(self, num_bytes: int) -> bool:
        """Makes room for parts of `num_bytes`, on all ranks at once; True: it is new, and all numbers in it are 0."""

    def room(self, kind: int, turn: int, num_bytes: int) -> Tensor:
        """This rank's: uint8 [n, num_bytes], of each rank what it wrote."""

    def copy(self, rank: int, kind: int, turn: int, part: Tensor, number: int | None, place: int = 0) -> None:
        """Starts to copy `part`, uint8 [N], when the work given until now has made it, into this rank's place in the room of `rank`,
        and then `number`, if any; copies of a rank are made one after the other. `place`: the bytes of a place, where parts are smaller."""

    def wait(self, rank: int, kind: int, number: int) -> None:
        """The work given from now on waits until `rank` has sent `number` or a later one."""

    def mark(self) -> Callable[[], None]:
        """A function after whose call the work given waits for the copies that were started before `mark`."""

    def release(self) -> None:
        """Ends this rank's waits, and after the copies that were started those of the others for this rank."""


class PeerCopies:
    """`hone.parallel.overlap.Exchange` of rank `index` of `size` through `memory`."""

    def __init__(self, index: int, size: int, memory: Memory) -> None:
        self.index, self.size, self._memory = index, size, memory
        self._calls = [0, 0]
        self._under_way: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerCopies:
        """A copy of a module that holds it has the same memory."""
        return self

    def gather(self, part: Tensor, *, whole: bool = False) -> _Gathering:
        """As `Exchange.gather`."""
        return _Gathering(self, part, self._begin(GATHER, part.nbytes), whole=whole)

    def sum(self, make: Callable[[int], Tensor]) -> _Summing:
        """As `Exchange.sum`."""
        call, made = None, []
        for step in range(1, self.size):
            rank = (self.index + step) % self.size
            made.append(make(rank).contiguous())
            call = self._begin(SUM, made[0].nbytes) if call is None else call
            self._memory.copy(rank, SUM, call % _TURNS, _bytes(made[-1]), call)
        assert call is not None, "an exchange has several ranks"
        sent = self._memory.mark()
        return _Summing(self, make(self.index), made, call, sent)

    def close(self, broken: bool) -> None:
        """As `Exchange.close`."""
        if broken:
            self._memory.release()

    def _begin(self, kind: int, num_bytes: int) -> int:
        """The number of a call."""
        assert kind not in self._under_way, "a call begins before the last one of its kind was used to its end"
        if self._memory.reserve(num_bytes):
            assert not self._under_way, "room grows while parts are on their way to it"
            self._calls = [0, 0]
        self._under_way.add(kind)
        self._calls[kind] += 1
        return self._calls[kind]

    @property
    def _sources(self) -> list[int]:
        """The other ranks in the order in which their parts come: each sends to the one after it first."""
        return [(self.index - step) % self.size for step in range(1, self.size)]


class _Gathering:
    def __init__(self, of: PeerCopies, part: Tensor, call: int, *, whole: bool) -> None:
        self._of, self._part, self._call, self._memory = of, part, call, of._memory
        self._has_whole, turn = whole, call % _TURNS
        self._room = self._memory.room(GATHER, turn, part.nbytes)
        for step in range(1, of.size):
            self._memory.copy((of.index + step) % of.size, GATHER, turn, _bytes(part), call)
        if whole:
            self._memory.copy(of.index, GATHER, turn, _bytes(part), None)
        self._sent = self._memory.mark()
        self._coming = list(of._sources)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        yield self._of.index, self._part
        every = self._room.view(self._part.dtype).view(-1, *self._part.shape)
        while self._coming:
            rank = self._coming.pop(0)
            self._memory.wait(rank, GATHER, self._call)
            yield rank, every[rank]
        if not self._has_whole:
            self._end()

    def whole(self) -> Tensor:
        assert self._has_whole, "this rank's own part was not copied"
        while self._coming:
            self._memory.wait(self._coming.pop(0), GATHER, self._call)
        self._end()
        return self._room.view(self._part.dtype).view(-1, *self._part.shape)

    def _end(self) -> None:
        self._sent()  # from here on `_part` may change
        self._of._under_way.discard(GATHER)


class _Summing:
    def __init__(self, of: PeerCopies, own: Tensor, made: list[Tensor], call: int, sent: Callable[[], None]) -> None:
        self._of, self._own, self._made, self._call, self._sent = of, own, made, call, sent

    def total(self) -> Tensor:
        found, memory = self._own, self._of._memory
        room = memory.room(SUM, self._call % _TURNS, found.nbytes).view(found.dtype).view(-1, *found.shape)
        for rank in self._of._sources:
            memory.wait(rank, SUM, self._call)
            found = found + room[rank]  # not in place: recomputation may keep what was made
        self._sent()  # from here on the memory of `_made` may be used again
        self._made = []
        self._of._under_way.discard(SUM)
        return found


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class GpuMemory:
    """`Memory` of the GPUs of one process group, which may all reach each other's: torch's symmetric memory. There are rooms of `kinds`
    kinds; `unreachable` makes the error where there is no such memory."""

    def __init__(
        self,
        group: Any,
        index: int,
        size: int,
        device: torch.device,
        kinds: int,
        unreachable: Callable[[str], SpecError],
    ) -> None:
        self._group, self._index, self._size, self._device = group, index, size, device
        self._kinds, self._unreachable = kinds, unreachable
        # It comes first where both streams have a kernel to start; most of what it does needs none.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._free = torch.cuda.Stream(device, priority=-1)  # has no work, so that it waits for nothing
        self._capacity = self._last = 0
        self._every: list[Tensor] = []
        self._number = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, num_bytes: int) -> bool:
        """As `Memory.reserve`."""
        if num_bytes <= self._capacity:
            return False
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)
        self._every = []
        self._capacity = -(-num_bytes // 256) * 256
        total = self._flags_at + self._kinds * self._size * 4
        memory = symmetric.empty(total, dtype=torch.uint8, device=self._device)
        try:
            handle = symmetric.rendezvous(memory, group=self._group)
        except RuntimeError as error:
            raise self._unreachable(f"symmetric memory says: {str(error)[:200]}") from None
        memory[self._flags_at :].zero_()
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)  # no rank sends a number before all are 0
        torch.cuda.synchronize(self._device)
        self._every = [
            memory if rank == self._index else handle.get_buffer(rank, (total,), torch.uint8)
            for rank in range(self._size)
        ]
        return True

    @property
    def _flags_at(self) -> int:
        return self._kinds * _TURNS * self._size * self._capacity

    def _flag(self, owner: int, kind: int, source: int) -> Tensor:
        at = self._flags_at + 4 * (kind * self._size + source)
        return self._every[owner][at : at + 4].view(torch.int32)

    def _room(self, owner: int, kind: int, turn: int, num_bytes: int) -> Tensor:
        at = (kind * _TURNS + turn) * self._size * self._capacity
        return self._every[owner][at : at + self._size * num_bytes].view(self._size, num_bytes)

    def room(self, kind: int, turn: int, num_bytes: int) -> Tensor:
        """As `Memory.room`."""
        return self._room(self._index, kind, turn, num_bytes)

    def copy(self, rank: int, kind: int, turn: int, part: Tensor, number: int | None, place: int = 0) -> None:
        """As `Memory.copy`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._last = max(self._last, number or 0)
        with torch.cuda.stream(self._stream):
            self._room(rank, kind, turn, place or len(part))[self._index, : len(part)].copy_(part)
            if number is not None:
                # Written here and copied there: in the order of the stream, so after the part.
                _stream_value("Write", self._stream, self._number, number)
                self._flag(rank, kind, self._index).copy_(self._number)

    def wait(self, rank: int, kind: int, number: int) -> None:
        """As `Memory.wait`."""
        _stream_value("Wait", torch.cuda.current_stream(self._device), self._flag(self._index, kind, rank), number)

    def mark(self) -> Callable[[], None]:
        """As `Memory.mark`."""
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def release(self) -> None:
        """As `Memory.release`."""
        if not self._every:
            return
        number = self._last + _LATER
        flags = [(kind, rank) for kind in range(self._kinds) for rank in range(self._size) if rank != self._index]
        with suppress(RuntimeError, AssertionError):  # where the GPU itself failed, its error is the one to show
            for kind, rank in flags:
                _stream_value("Write", self._free, self._flag(self._index, kind, rank), number)
            with torch.cuda.stream(self._stream):
                _stream_value("Write", self._stream, self._number, number)
                for kind, rank in flags:
                    self._flag(rank, kind, self._index).copy_(self._number)


def gpu_memory(
    axis: Axis,
    device: torch.device,
    *,
    asked: str = "enable_async_tensor_parallel",
    fix: str = "set parallelism.enable_async_tensor_parallel: false",
    kinds: int = 2,
) -> GpuMemory:
    """The memory of the ranks of `axis`, which all call it, with rooms of `kinds` kinds. Raises SpecError where their GPUs cannot write
    each other's, which says what `asked` for it and how to `fix` that."""

    def unreachable(why: str) -> SpecError:
        return SpecError(f"{asked} needs GPUs of one host that can write each other's memory: {why}", fix=fix)

    places: list[Any] = [None] * axis.size
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=axis.group)
    if len({host for host, _ in places}) > 1:
        raise unreachable(f"the ranks are on the hosts {', '.join(sorted({host for host, _ in places}))}")
    for _, other in places:
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            raise unreachable(f"GPU {device.index} cannot reach the memory of GPU {other}")
    return GpuMemory(axis.group, axis.index, axis.size, device, kinds, unreachable)


def _stream_value(what: str, stream: torch.cuda.Stream, at: Tensor, value: int) -> None:
    """`stream` writes the int32 `value` at the first element of `at`, or waits until it is `value` or later: no kernel does it.

    CUDA driver API, "Stream Memory Operations"; 0 is the flag of both: a write after all that the stream did before, a wait for `>=`.
    """
    call = getattr(_driver(), f"cuStream{what}Value32_v2")
    found = call(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(at.data_ptr()), ctypes.c_uint32(value), 0)
    assert found == 0, f"cuStream{what}Value32 returned {found}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
