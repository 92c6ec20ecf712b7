"""Memory that the fronts of one server share: the sequences in progress of each, what it counted and what it heard."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import DupFd
from typing import Any

from hone.serve.http.processes.tallies import Tallies

_SLOT = 2**18
_NUMBER = struct.Struct("=q")
_HEAD = struct.Struct("=II")


@dataclass(frozen=True)
class EngineReport:
    """What a front last heard of one engine: its steps, and its figures with the time (s, monotonic) they are of."""

    steps: int = 0
    at: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FrontReport:
    """What a front tells the others: what it counted, and what it last heard of each engine."""

    counted: Tallies = field(default_factory=dict)
    heard: tuple[EngineReport, ...] = ()


def newest(each: Iterable[tuple[EngineReport, ...]]) -> list[EngineReport]:
    """Of each engine what is newest of all that fronts heard."""
    found: list[EngineReport] = []
    for heard in each:
        for index, one in enumerate(heard):
            if index == len(found):
                found.append(one)
            other = found[index]
            latest = one if one.at > other.at else other
            found[index] = replace(latest, steps=max(one.steps, other.steps))
    return found


def added(heard: Iterable[EngineReport]) -> dict[str, float]:
    """The figures of several engines, added up; of the joules of the processor, which all of them read, the most."""
    total: dict[str, float] = {}
    for one in heard:
        for name, value in one.stats.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name == "processor_joules" else before + value
    return total


class FrontBoard:
    """One slot for each front: its outstanding sequences at each of `replicas` engines, and what it tells the others.

    A front writes only its own slot, and reads all of them without a lock. Numbers are written whole. What is told is
    written to the half of the slot that is not read, then a number turns readers to it: they find what was told last,
    also of a front that is killed while it writes. The slot outlives its front: the next one goes on counting from it.
    """

    def __init__(self, fronts: int, replicas: int = 1, handle: int | None = None) -> None:
        self.fronts, self.replicas = fronts, replicas
        self._handle = os.memfd_create("hone-board") if handle is None else handle
        if handle is None:
            os.ftruncate(self._handle, fronts * _SLOT)
        self._memory = mmap.mmap(self._handle, fronts * _SLOT)

    def __reduce__(self) -> Any:  # to a process that is being spawned
        return _opened, (self.fronts, self.replicas, DupFd(self._handle))

    def count(self, front: int, replica: int, outstanding: int) -> None:
        """Sets how many sequences `front` has in progress at `replica`."""
        _NUMBER.pack_into(self._memory, front * _SLOT + replica * _NUMBER.size, outstanding)

    def leave(self, front: int) -> None:
        """The front has ended: nothing of it is in progress; what it counted stays."""
        for replica in range(self.replicas):
            self.count(front, replica, 0)

    def outstanding(self, replica: int) -> int:
        """Sequences of all fronts in progress at `replica`."""
        offset = replica * _NUMBER.size
        return sum(_NUMBER.unpack_from(self._memory, front * _SLOT + offset)[0] for front in range(self.fronts))

    def total(self) -> int:
        """Sequences of all fronts in progress at all replicas."""
        return sum(map(self.outstanding, range(self.replicas)))

    def tell(self, front: int, told: FrontReport) -> None:
        """Replaces what `front` tells the others."""
        data = zlib.compress(pickle.dumps(told, pickle.HIGHEST_PROTOCOL), 1)
        turn = self._turn(front) + 1
        start, end = self._half(front, turn)
        assert start + _HEAD.size + len(data) <= end, "what a front tells does not fit its slot"
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, start, len(data), zlib.crc32(data))
        _NUMBER.pack_into(self._memory, front * _SLOT + self.replicas * _NUMBER.size, turn)

    def told(self, front: int) -> FrontReport:
        """What `front` told last."""
        while turn := self._turn(front):
            start, end = self._half(front, turn)
            length, check = _HEAD.unpack_from(self._memory, start)
            data = self._memory[start + _HEAD.size : min(start + _HEAD.size + length, end)]
            if zlib.crc32(data) == check:
                told: FrontReport = pickle.loads(zlib.decompress(data))
                return told
            time.sleep(0)  # it told twice meanwhile
        return FrontReport()

    def _turn(self, front: int) -> int:
        number: int = _NUMBER.unpack_from(self._memory, front * _SLOT + self.replicas * _NUMBER.size)[0]
        return number

    def _half(self, front: int, turn: int) -> tuple[int, int]:
        """Where what is told at `turn` begins, and where its room ends."""
        numbers = (self.replicas + 1) * _NUMBER.size
        size = (_SLOT - numbers) // 2
        start = front * _SLOT + numbers + turn % 2 * size
        return start, start + size


def _opened(fronts: int, replicas: int, handle: Any) -> FrontBoard:
    return FrontBoard(fronts, replicas, handle.detach())
