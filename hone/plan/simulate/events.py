"""A loop of events under a clock of its own: what happens next is the earliest event, and of those at one time the first told."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class EventLoop:
    """Calls what was told to happen, in the order of time. The same events give the same run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        """Seconds of the simulation."""
        return self.now

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Has `call` called at `time_s`, not before now."""
        heapq.heappush(self._heap, (max(time_s, self.now), next(self._order), call))

    def run(self) -> None:
        """Until nothing is left to happen, or `stopped` is set."""
        while self._heap and not self.stopped:
            self.now, _, call = heapq.heappop(self._heap)
            call()
