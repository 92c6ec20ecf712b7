"""The Ray executor: the same tasks as plain Ray tasks, on this machine or a cluster that shares a disk or a store."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.data.executors.base import RETRIES, Executor, Pool, Rescue, given_up
from hone.data.executors.processes import Processes
from hone.data.executors.task import Function, Task, finished, perform
from hone.data.executors.worker import peak_memory_bytes

_AHEAD = 4


class Ray(Executor):
    """Does tasks as plain Ray tasks of one core, tried again when a worker dies. Moritz et al. 2018, arXiv:1712.05889.

    Text never goes through Ray: tasks read and write files, so all machines must see the same folders, or the same `store`.
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
            yield _OnRay(ray, self.workers or int(ray.cluster_resources().get("CPU", 1)))
        finally:
            if begun:
                ray.shutdown()

    def _begin(self, ray: Any) -> None:
        if not self.address:
            raise SpecError(
                "executor 'ray': Ray does not run in this process and no address is given",
                fix="--executor.address=local starts it here, --executor.address=auto joins the cluster of this machine",
            )
        # Workers must import what this process would.
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


class _OnRay:
    def __init__(self, ray: Any, workers: int) -> None:
        self._ray, self.workers = ray, workers
        self._submit = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)(_perform).remote
        self.peak_memory_bytes: int | None = None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        tasks = list(tasks)
        running: dict[int, Any] = {}
        results: dict[int, dict[str, Any]] = {}
        following = 0
        try:
            for wanted in range(len(tasks)):
                while following < min(len(tasks), wanted + _AHEAD * self.workers):
                    before = finished(function, tasks[following])
                    if before is None:
                        running[following] = self._submit(function, tasks[following])
                    else:
                        results[following] = before
                    following += 1
                while wanted not in results:
                    answer = self._answer(running.pop(wanted))
                    if answer is None:
                        other = rescue(tasks[wanted]) if rescue else None
                        if other is None:
                            raise given_up(tasks[wanted], "see Ray's log")
                        tasks[wanted] = other
                        if other.kept is None:
                            running[wanted] = self._submit(function, other)
                        else:  # what it notes before it dies lies on its own machine: so here, where `rescue` looks
                            results[wanted] = self._here(function, other, rescue)
                    else:
                        results[wanted] = answer
                yield results.pop(wanted)
        finally:
            for reference in running.values():
                self._ray.cancel(reference, force=True)

    def _here(self, function: Function, task: Task, rescue: Rescue | None) -> dict[str, Any]:
        """Does a task that kills its workers in a process of this machine, with `rescue` as often as it takes."""
        with Processes(workers=1).open() as pool:
            (summary,) = pool.map(function, [task], rescue)
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, pool.peak_memory_bytes or 0)
        return summary

    def _answer(self, reference: Any) -> dict[str, Any] | None:
        """The summary that a task gave; None when its worker died. Raises what the task raised."""
        try:
            summary, memory = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (
            self._ray.exceptions.WorkerCrashedError,
            self._ray.exceptions.OutOfMemoryError,
            self._ray.exceptions.NodeDiedError,
        ):
            return None
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory)
        return summary


def _perform(function: Function, task: Task) -> tuple[dict[str, Any], int]:
    return perform(function, task), peak_memory_bytes()
