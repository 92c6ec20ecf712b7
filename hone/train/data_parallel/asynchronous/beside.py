"""Work beside a rank's passes: a thread whose error is raised where its end is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Beside:
    """`work` in a thread, which does not outlive the process; `end` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._do, args=(work,), name="beside passes", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Waits for the work."""
        self._thread.join()
        if self._error is not None:
            raise self._error
