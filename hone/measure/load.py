"""Processor time of other processes on this machine between two measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Load(NamedTuple):
    """Processor time up to now, in seconds summed over the processors this process may use."""

    at_s: float
    own_s: float
    """Of this process, all threads."""
    busy_s: float | None
    """Of all processes, including time stolen by a hypervisor; None where the system does not report it (no /proc)."""
    average: float
    """Mean number of processes that ran or waited to run in the last minute, on any processor."""
    num_processors: int

    def others_since(self, before: Load) -> float:
        """Mean number of processors that other processes kept busy from `before` on.

        Without /proc: the load average of `before`, which includes this process in the minute before it.
        """
        passed = self.at_s - before.at_s
        if self.busy_s is None or before.busy_s is None or passed <= 0:
            return before.average
        others = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return max(0.0, others / passed)


def processor_load(
    stat: Path = Path("/proc/stat"),
    clock: Callable[[], float] = time.perf_counter,
    own: Callable[[], float] = time.process_time,
) -> Load:
    """The load now."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        busy = _busy_s(stat.read_text(encoding="utf8").splitlines(), allowed)
    except (OSError, ValueError):
        busy = None
    try:
        average = os.getloadavg()[0]
    except OSError:
        average = 0.0
    return Load(clock(), own(), busy, average, len(allowed))


def _busy_s(lines: Iterable[str], allowed: set[int]) -> float | None:
    """Seconds that processors in `allowed` did not idle, by /proc/stat; None when it does not list them or counts nothing.

    Fields after the name, in ticks: user, nice, system, idle, waiting for a disk, interrupts (2), stolen.
    """
    busy = found = 0.0
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _, _, hard, soft, stolen = map(int, fields[:8])
            busy += user + nice + system + hard + soft + stolen
            found += 1
    if found < len(allowed) or not busy:
        return None
    return busy / os.sysconf("SC_CLK_TCK")
