"""What an executor is: it opens a pool, and the pool maps a function over tasks, results in order; the loop of pools whose workers may die."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from hone.base.errors import MachineError
from hone.base.table import Technique
from hone.data.executors.task import Function, Task, finished

Rescue = Callable[[Task], Task | None]
"""What to try instead of a task that killed its worker twice (and each time after that); None: nothing is left to try."""
RETRIES = 1
"""How often a task whose worker died is tried again as it is: memory may have been short for a moment."""
AHEAD = 4
"""Tasks that are begun before the results of earlier ones are taken: so many a worker."""


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


class Outcome(NamedTuple):
    """How task number `number` ended: with a summary, with what it raised, or with the death of its worker (`died` says how)."""

    number: int
    summary: dict[str, Any] | None = None
    error: BaseException | None = None
    died: str = ""


class RunAhead:
    """`Pool.map` for workers that run ahead of the results and may die. A subclass says how tasks start and how they end."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.peak_memory_bytes: int | None = None

    def has_room(self) -> bool:
        """Whether another task can be started now."""
        raise NotImplementedError

    def start(self, number: int, function: Function, task: Task, rescue: bool) -> None:
        """Starts a task. `rescue`: it killed its workers before, and this is what to try instead."""
        raise NotImplementedError

    def ended(self) -> list[Outcome]:
        """Waits until a task ends; all that have."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Stops all tasks that have not ended."""
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
                                raise _given_up(task, outcome.died)
                            tasks[outcome.number] = other
                        waiting.append(outcome.number)
                result = results.pop(wanted)
                if result.error is not None:  # only now: the error that is raised must not depend on timing
                    raise result.error
                yield result.summary
        finally:
            self.give_up()

    def note_memory(self, num_bytes: int | None) -> None:
        """Takes in the most memory that a worker held."""
        if num_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, num_bytes)


class Executor(Technique):
    """Where tasks run. Outside of a stage's identity: the bytes it writes are the same with every executor and number of workers."""

    paper: ClassVar[str] = ""
    workers: int = Field(0, ge=0, description="Tasks at a time; 0: as many as cores.")
    store: str = Field(
        "",
        description="URL (s3://bucket/runs) or absolute folder where what tasks wrote is kept too: then machines need no common disk, "
        "and a stage whose machine was lost goes on elsewhere; none: off.",
    )

    def open(self) -> AbstractContextManager[Pool]:
        """Starts what is needed; on leaving, all of it is gone."""
        raise NotImplementedError


def _given_up(task: Task, how: str) -> MachineError:
    """The error of a task that nothing could be done about."""
    return MachineError(
        f"task {task.name} killed its worker {RETRIES + 1} times ({how})",
        fix="give it more memory or fewer workers; --executor=serial shows what happens in it",
    )
