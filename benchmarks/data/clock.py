"""Timing of a call in the data room's benchmarks: process CPU seconds, the best of a few rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def best_of(rounds: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """(least process CPU seconds, the last result) of `rounds` calls."""
    best, result = float("inf"), None
    for _ in range(rounds):
        begun = time.process_time()
        result = call()
        best = min(best, time.process_time() - begun)
    return best, result
