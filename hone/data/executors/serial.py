"""The serial executor: one task after the other in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hone.data.executors.base import Executor, Pool, Rescue
from hone.data.executors.task import Function, Task, perform


class Serial(Executor):
    """Runs one task after the other in this process, which is easiest to watch and debug; ignores `workers`."""

    @contextmanager
    def open(self) -> Iterator[Pool]:
        yield _Here()


class _Here:
    workers = 1
    peak_memory_bytes = None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        for task in tasks:
            yield perform(function, task)
