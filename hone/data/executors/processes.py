"""The processes executor: fresh Python processes on this machine, replaced when they die."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait

from hone.data.executors.base import Executor, Outcome, Pool, RunAhead
from hone.data.executors.task import Function, Task

ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COMMAND = "import sys; sys.path[:] = {path!r}; from hone.data.executors.worker import work; work({given}, {answers})"


class Processes(Executor):
    """Runs tasks in single-threaded processes of this machine; when one dies, it is replaced and its task retried."""

    @contextmanager
    def open(self) -> Iterator[Pool]:
        pool = _Processes(self.workers or _cores())
        try:
            yield pool
        finally:
            pool.close()


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process, started without running the main module again, so that scripts need no `if __name__` guard."""

    def __init__(self) -> None:
        given, self._given = os.pipe()
        answers, theirs = os.pipe()
        command = _COMMAND.format(path=sys.path, given=given, answers=theirs)
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
        self.process = subprocess.Popen([sys.executable, "-c", command], pass_fds=(given, theirs), env=environment)
        os.close(given)
        os.close(theirs)
        self.answers = Connection(answers, writable=False)
        self.tasks = Connection(self._given, readable=False)

    def stop(self) -> None:
        """Kills the process and abandons its task."""
        self.process.kill()
        self.process.wait()
        self.answers.close()
        self.tasks.close()


class _Processes(RunAhead):
    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def has_room(self) -> bool:
        return len(self._busy) < self.workers

    def start(self, number: int, function: Function, task: Task, rescue: bool) -> None:
        worker = self._idle.pop() if self._idle else _Worker()
        self._busy[worker.answers] = (worker, number)
        with suppress(BrokenPipeError):  # it died while idle, which `ended` finds
            worker.tasks.send((function, task))

    def ended(self) -> list[Outcome]:
        outcomes = []
        for connection in wait(list(self._busy)):
            worker, number = self._busy.pop(connection)
            try:
                summary, error, memory = pickle.loads(worker.answers.recv_bytes())
                self.note_memory(memory)
                outcomes.append(Outcome(number, summary, error))
                self._idle.append(worker)
            except (EOFError, OSError):
                worker.process.wait()
                outcomes.append(Outcome(number, died=_how(worker.process.returncode)))
                worker.stop()
        return outcomes

    def give_up(self) -> None:
        for worker, _ in self._busy.values():  # after an error, or when the caller stopped early
            worker.stop()
        self._busy.clear()

    def close(self) -> None:
        """Ends all workers."""
        self.give_up()
        for worker in self._idle:
            worker.stop()
        self._idle.clear()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
