"""Work to be timed, and the seconds of a call of it on one device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GPU_TRY_S = 1e-3
"""Seconds of a try on a GPU: so many calls that the wait for the last of them (10 us) is negligible."""


@dataclass(frozen=True)
class Probe:
    """Work to be timed for about `budget_s` in all, `inner` calls at a time; `amount` is the FLOPs, bytes or values of a call."""

    work: Callable[[], object]
    amount: float
    budget_s: float
    inner: int = 1
    wants_grad: bool = False


class Timer:
    """Seconds of a call on one device, the median of several tries: what long work gets, not the best case."""

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.cuda = device.startswith("cuda")
        self.clock = clock

    def typical(self, probe: Probe, budget_s: float) -> float:
        """Median seconds of one call among tries that together take about `budget_s`; one try is made in any case."""
        inner = max(probe.inner, self._calls(probe)) if self.cuda else probe.inner
        tries, begun = [], self.clock()
        while True:
            before = self.clock()
            for _ in range(inner):
                probe.work()
            self.wait()
            now = self.clock()
            tries.append((now - before) / inner)
            if now - begun >= budget_s:
                return statistics.median(tries)

    def _calls(self, probe: Probe) -> int:
        """Number of calls of `work` for a try of `_GPU_TRY_S`; loads the kernels."""
        probe.work()
        self.wait()
        before = self.clock()
        probe.work()
        self.wait()
        return min(200, math.ceil(_GPU_TRY_S / max(self.clock() - before, 1e-9)))

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
