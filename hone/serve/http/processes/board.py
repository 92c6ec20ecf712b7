"""Memory that the fronts of one server share: how many sequences each has in progress, and what each has counted."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from multiprocessing.reduction import DupFd
from typing import Any

from hone.serve.http.processes.tallies import State

_SLOT = 2**17
_NUMBER = struct.Struct("=q")
_HEAD = struct.Struct("=II")


class Board:
    """One slot for each front: its outstanding sequences at each of `replicas` engines, and its tallies.

    A front writes only its own slot, and reads all of them without a lock: numbers are written whole, tallies have a
    checksum. The slot outlives its front: the next one goes on counting from it.
    """

    def __init__(self, fronts: int, replicas: int = 1, handle: int | None = None) -> None:
        self.fronts, self.replicas = fronts, replicas
        self._handle = os.memfd_create("hone-board") if handle is None else handle
        if handle is None:
            os.ftruncate(self._handle, fronts * _SLOT)
        self._memory = mmap.mmap(self._handle, fronts * _SLOT)
        self._latest: dict[int, State] = {}

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
        place = replica * _NUMBER.size
        return sum(_NUMBER.unpack_from(self._memory, front * _SLOT + place)[0] for front in range(self.fronts))

    def total(self) -> int:
        """Sequences of all fronts in progress at all replicas."""
        return sum(map(self.outstanding, range(self.replicas)))

    def publish(self, front: int, state: State) -> None:
        """Replaces what `front` has counted."""
        data = zlib.compress(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), 1)
        start = self._tallies(front)
        assert start + _HEAD.size + len(data) <= (front + 1) * _SLOT, "tallies do not fit their slot"
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, start, len(data), zlib.crc32(data))

    def state(self, front: int) -> State:
        """What `front` has counted; while it is being written, what was read before."""
        start = self._tallies(front)
        length, check = _HEAD.unpack_from(self._memory, start)
        data = self._memory[start + _HEAD.size : start + _HEAD.size + min(length, _SLOT)]
        if length and zlib.crc32(data) == check:
            self._latest[front] = pickle.loads(zlib.decompress(data))
        return self._latest.get(front, {})

    def _tallies(self, front: int) -> int:
        return front * _SLOT + self.replicas * _NUMBER.size


def _opened(fronts: int, replicas: int, handle: Any) -> Board:
    return Board(fronts, replicas, handle.detach())
