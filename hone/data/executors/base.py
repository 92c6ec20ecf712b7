"""What an executor is: it opens a pool, and the pool maps a function over tasks, results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from pydantic import Field

from hone.base.errors import MachineError
from hone.base.figure import Estimate
from hone.base.table import Technique
from hone.data.executors.task import Function, Task

Rescue = Callable[[Task], Task | None]
"""What to try instead of a task that killed its worker twice (and each time after that); None: nothing is left to try."""
RETRIES = 1
"""How often a task whose worker died is tried again as it is: memory may have been short for a moment."""


class Pool(Protocol):
    """An opened executor: `workers` tasks at a time. `peak_memory_bytes` is the most that a worker held; None without any."""

    workers: int
    peak_memory_bytes: int | None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        """The summaries of `tasks` in their order, each as soon as it and all before it are done.

        What a task raises is raised here. Closing the iterator gives up what is not done. Raises MachineError when a
        task goes on killing its workers.
        """
        ...


class Executor(Technique):
    """Where tasks run. Outside of a stage's identity: the bytes it writes are the same with every executor and number of workers."""

    paper: ClassVar[str] = ""
    workers: int = Field(0, ge=0, description="Tasks at a time; 0: as many as cores.")
    store: str = Field(
        "",
        description="URL (s3://bucket/runs) where what tasks wrote is kept too: then machines need no common disk, "
        "and a stage whose machine was lost goes on elsewhere; none: off.",
    )

    def open(self) -> AbstractContextManager[Pool]:
        """Starts what is needed; on leaving, all of it is gone."""
        raise NotImplementedError

    def estimates(self, seconds: float, num_cores: int) -> dict[str, Estimate]:  # type: ignore[override]
        """Time of work that takes `seconds` on one core, when nothing is lost."""
        workers = min(self.workers or num_cores, num_cores)
        return {
            "time_s": Estimate(
                value=seconds / workers, unit="s", formula=f"{seconds:.3g} s / {workers} workers", bound=True
            )
        }


def given_up(task: Task, how: str) -> MachineError:
    """The error of a task that nothing could be done about."""
    return MachineError(
        f"task {task.name} killed its worker {RETRIES + 1} times ({how})",
        fix="give it more memory or fewer workers; --executor=serial shows what happens in it",
    )
