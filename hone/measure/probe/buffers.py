"""Memory for a probe: anonymous pages, small or large as asked, and what the kernel really gave."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hone.measure.topology.limits import lines_of


class Buffer:
    """`num_bytes` of zeroed anonymous memory that no page has been given to yet: the first touch places them."""

    def __init__(self, num_bytes: int, *, huge: bool) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without them
                self._map.madvise(advice)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self._bytes.ctypes.data)

    def view(self, dtype: Any, num_bytes: int | None = None) -> Any:
        """Its first `num_bytes` as an array of `dtype`."""
        return self._bytes[: num_bytes or len(self._bytes)].view(dtype)

    def huge_bytes(self) -> int | None:
        """Bytes of it that are in large pages; None where the kernel does not tell (no /proc/self/smaps)."""
        inside, found = False, None
        begin, end = self.address, self.address + len(self._bytes)
        for line in lines_of(Path("/proc/self/smaps")):
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(one, 16) for one in first.split("-"))
                inside = low < end and begin < high  # neighbours with the same advice are merged
            elif inside and line.startswith("AnonHugePages:"):
                found = (found or 0) + (int(line.split()[1]) << 10)
        return found
