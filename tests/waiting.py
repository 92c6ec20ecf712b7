"""Waiting for what happens in other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Seconds within which happens what must happen, on a busy machine too: only a failure is waited for so long."""


def wait_until(happened: Callable[[], object], says: Callable[[], str] = lambda: "it did not happen") -> None:
    """Returns when `happened()` is true; fails with `says()` when it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, says()
        time.sleep(0.01)
