"""The Ray executor: the same tasks as plain Ray tasks, on this machine or a cluster with a shared disk or store."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.data.executors.base import Executor, Outcome, Pool, RunAhead
from hone.data.executors.processes import Processes, peak_memory_bytes
from hone.data.executors.task import Function, Task, perform


class Ray(Executor):
    """Runs tasks as plain Ray tasks of one core, retried when a worker dies. Moritz et al. 2018, arXiv:1712.05889.

    Text is not sent through Ray: tasks read and write files, so all machines must share their folders, or a `store`.
    """

    paper = "arXiv:1712.05889"
    address: str = Field(
        "",
        description="'local' starts Ray on this machine, 'auto' or HOST:PORT joins a cluster; none: Ray is running in this process.",
    )

    @contextmanager
    def open(self) -> Iterator[Pool]:
        try:
            import ray
        except ImportError:
            raise MissingExtra.of("running tasks on Ray", "ray", "ray") from None
        begun = not ray.is_initialized()
        if begun:
            self._begin(ray)
        try:
            yield _OnRay(ray, self.workers or int(ray.cluster_resources().get("CPU", 1)), ends=begun)
        finally:
            if begun:
                ray.shutdown()

    def _begin(self, ray: Any) -> None:
        if not self.address:
            raise SpecError(
                "executor 'ray': Ray is not running in this process and no address is given",
                fix="--executor.address=local starts it here, --executor.address=auto joins the cluster of this machine",
            )
        # Workers must import the modules that this process would.
        shared: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}},
            "log_to_driver": False,
            "logging_level": "error",
        }
        if self.address == "local":
            ray.init(address="local", num_cpus=self.workers or None, include_dashboard=False, **shared)
        else:
            try:
                ray.init(address=self.address, **shared)
            except (ConnectionError, ValueError) as error:
                raise SpecError(
                    f"executor 'ray': no cluster at '{self.address}': {error}", fix="start one with: ray start --head"
                ) from None


class _OnRay(RunAhead):
    """`ends`: this process leaves Ray after the pool, which ends its tasks."""

    def __init__(self, ray: Any, workers: int, *, ends: bool) -> None:
        super().__init__(workers)
        self._ray, self._ends = ray, ends
        self._submit = ray.remote(num_cpus=1, max_retries=0, retry_exceptions=False)(_perform).remote
        self._running: dict[Any, int] = {}
        self._done_here: list[Outcome] = []

    def has_room(self) -> bool:
        return True

    def start(self, number: int, function: Function, task: Task, rescue: bool) -> None:
        if rescue and task.kept is not None:
            # A careful task writes each document's name to its machine's disk, which this process reads after a death: run it here.
            self._done_here.append(self._here(number, function, task))
        else:
            self._running[self._submit(function, task)] = number

    def ended(self) -> list[Outcome]:
        here, self._done_here = self._done_here, []
        done = self._ray.wait(list(self._running), num_returns=1)[0] if not here else []
        return here + [self._outcome(reference, self._running.pop(reference)) for reference in done]

    def give_up(self) -> None:
        # A task that ends while it is cancelled makes Ray (2.60, "Tried to complete task that was not pending") abort this process.
        for reference in () if self._ends else self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._done_here.clear()

    def _here(self, number: int, function: Function, task: Task) -> Outcome:
        """Runs a task in a process of this machine."""
        with Processes(workers=1).open() as pool:
            pool.start(number, function, task, rescue=True)
            (outcome,) = pool.ended()
            self.note_memory(pool.peak_memory_bytes)
        return outcome

    def _outcome(self, reference: Any, number: int) -> Outcome:
        failures = self._ray.exceptions
        try:
            summary, memory = self._ray.get(reference)
        except failures.RayTaskError as error:
            return Outcome(number, error=error.cause)
        except (failures.WorkerCrashedError, failures.OutOfMemoryError, failures.NodeDiedError):
            return Outcome(number, died="see Ray's log")
        self.note_memory(memory)
        return Outcome(number, summary)


def _perform(function: Function, task: Task) -> tuple[dict[str, Any], int]:
    return perform(function, task), peak_memory_bytes()
