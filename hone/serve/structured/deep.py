"""A thread with a large stack: the compiler of grammars recurses, and a client's grammar must not end the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

STACK_BYTES = 512 * 2**20
"""Address space, not memory: pages are taken when they are used. Enough for a level for each of 64 thousand characters."""

_starting = threading.Lock()


class DeepThread:
    """Runs functions one after another in one thread of `STACK_BYTES`, started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The future result of `function(*arguments)`."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        with _starting:
            if self._thread is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                finally:
                    threading.stack_size(before)
        return future

    def _run(self) -> None:
        while True:
            future, function, arguments = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del future, function, arguments
