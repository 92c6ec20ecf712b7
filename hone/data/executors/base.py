"""The base of executors: an executor opens a pool, which maps a function over tasks in order and survives dying workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from hone.base.errors import MachineError
from hone.base.table import Technique
from hone.data.executors.task import Function, Task, finished

Rescue = Callable[[Task], Task | None]
"""The task to try instead of one that killed its worker twice (and after each further death); None: give up."""
RETRIES = 1
"""How often a task whose worker died is retried unchanged: memory may have been short temporarily."""
AHEAD = 4
"""Tasks per worker that are started before the results of earlier ones are taken."""


class Pool(Protocol):
    """An opened executor: runs `workers` tasks at a time. `peak_memory_bytes` is the largest worker's; None before a task is done."""

    workers: int
    peak_memory_bytes: int | None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        """The summaries of `tasks` in their order, each as soon as it and all earlier ones are done.

        What a task raises is raised here. Closing the iterator cancels unfinished tasks. Raises MachineError when a
        task repeatedly kills its workers.
        """
        ...


class Outcome(NamedTuple):
    """How task `number` ended: with a summary, with an exception, or with its worker's death, described by `died`."""

    number: int
    summary: dict[str, Any] | None = None
    error: BaseException | None = None
    died: str = ""


class RunAhead:
    """`Pool.map` for workers that run ahead of the results and may die. A subclass starts tasks and waits for their ends."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.peak_memory_bytes: int | None = None

    def has_room(self) -> bool:
        """Whether another task can be started now."""
        raise NotImplementedError

    def start(self, number: int, function: Function, task: Task, rescue: bool) -> None:
        """Starts a task; with `rescue`, one that replaces a task that killed its workers."""
        raise NotImplementedError

    def ended(self) -> list[Outcome]:
        """Waits until a task ends; returns all that have."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Stops all unfinished tasks."""
        raise NotImplementedError

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        tasks = list(tasks)
        deaths = [0] * len(tasks)
        results: dict[int, Outcome] = {}
        waiting = list(range(len(tasks)))[::-1]
        try:
            for wanted in range(len(tasks)):
                while wanted not in results:
                    while waiting and waiting[-1] < wanted + AHEAD * self.workers and self.has_room():
                        number = waiting.pop()
                        before = finished(function, tasks[number])
                        if before is not None:
                            results[number] = Outcome(number, before)
                        else:
                            self.start(number, function, tasks[number], deaths[number] > RETRIES)
                    for outcome in self.ended() if wanted not in results else ():
                        if not outcome.died:
                            results[outcome.number] = outcome
                            continue
                        deaths[outcome.number] += 1
                        if deaths[outcome.number] > RETRIES:
                            task = tasks[outcome.number]
                            other = rescue(task) if rescue else None
                            if other is None:
                                raise given_up(task, outcome.died)
                            tasks[outcome.number] = other
                        waiting.append(outcome.number)
                result = results.pop(wanted)
                if result.error is not None:  # raised in order: which error is raised must not depend on timing
                    raise result.error
                yield result.summary
        finally:
            self.give_up()

    def note_memory(self, num_bytes: int | None) -> None:
        """Updates `peak_memory_bytes` with a worker's peak."""
        if num_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, num_bytes)


class Executor(Technique):
    """Where tasks run. Not part of a stage's identity: the output bytes are the same with every executor and number of workers."""

    paper: ClassVar[str] = ""
    workers: int = Field(0, ge=0, description="Tasks at a time; 0: one per core.")
    store: str = Field(
        "",
        description="URL (s3://bucket/runs) or absolute folder where tasks' results are copied to: then machines need no shared disk, "
        "and a stage whose machine was lost can resume on another; none: off.",
    )

    def open(self) -> AbstractContextManager[Pool]:
        """Starts the workers; on leaving, they are stopped."""
        raise NotImplementedError


def given_up(task: Task, how: str) -> MachineError:
    """The error of a task that failed after all retries."""
    return MachineError(
        f"task {task.name} killed its worker {RETRIES + 1} times ({how})",
        fix="give it more memory or fewer workers; --executor=serial runs it in this process",
    )
