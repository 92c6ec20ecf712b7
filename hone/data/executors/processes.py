"""The processes executor: fresh Python processes on this machine, each replaced when it dies."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from hone.data.executors.base import RETRIES, Executor, Pool, Rescue, given_up
from hone.data.executors.task import Function, Task, finished

_AHEAD = 4
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COMMAND = "import sys; sys.path[:] = {path!r}; from hone.data.executors.worker import work; work({given}, {answers})"


class Processes(Executor):
    """Does tasks in processes of this machine, each of one thread; a dead one is replaced and its task tried again."""

    @contextmanager
    def open(self) -> Iterator[Pool]:
        pool = _Processes(self.workers or _cores())
        try:
            yield pool
        finally:
            pool.close()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process, started bare: it never runs the main module again, so a script needs no guard against that."""

    def __init__(self) -> None:
        given, self._given = os.pipe()
        answers, theirs = os.pipe()
        command = _COMMAND.format(path=sys.path, given=given, answers=theirs)
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        self.process = subprocess.Popen([sys.executable, "-c", command], pass_fds=(given, theirs), env=environment)
        os.close(given)
        os.close(theirs)
        self.answers = Connection(answers, writable=False)
        self.tasks = Connection(self._given, readable=False)

    def stop(self) -> None:
        """Kills it; what it was doing is left undone."""
        self.process.kill()
        self.process.wait()
        self.answers.close()
        self.tasks.close()


class _Processes:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}
        self.peak_memory_bytes: int | None = None

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        tasks = list(tasks)
        deaths = [0] * len(tasks)
        results: dict[int, dict[str, Any] | BaseException] = {}
        waiting = list(range(len(tasks)))[::-1]
        try:
            for wanted in range(len(tasks)):
                while wanted not in results:
                    self._hand_out(function, tasks, waiting, results, wanted + _AHEAD * self.workers)
                    for number, answer, code in self._hear():
                        if answer is not None:
                            results[number] = self._opened(answer)
                            continue
                        deaths[number] += 1
                        if deaths[number] > RETRIES:
                            other = rescue(tasks[number]) if rescue else None
                            if other is None:
                                raise given_up(tasks[number], _how(code))
                            tasks[number] = other
                        waiting.append(number)
                result = results.pop(wanted)
                if isinstance(
                    result, BaseException
                ):  # only now: which error is raised must not depend on who was first
                    raise result
                yield result
        finally:
            for worker, _ in self._busy.values():  # an error, or the caller has enough
                worker.stop()
            self._busy.clear()

    def _hand_out(self, function: Function, tasks: list[Task], waiting: list[int], results: dict, end: int) -> None:
        """Gives work to idle workers, starting them as needed; nothing from number `end` on."""
        while waiting and waiting[-1] < end and len(self._busy) < self.workers:
            number = waiting.pop()
            before = finished(function, tasks[number])
            if before is not None:
                results[number] = before
                continue
            worker = self._idle.pop() if self._idle else _Worker()
            self._busy[worker.answers] = (worker, number)
            with suppress(BrokenPipeError):  # it died idle; its answers say so
                worker.tasks.send((function, tasks[number]))

    def _hear(self) -> list[tuple[int, bytes | None, int]]:
        """(task number, answer, 0) of every worker that is done, (number, None, exit code) of every dead one; waits for one."""
        heard = []
        for connection in wait(list(self._busy)) if self._busy else ():
            worker, number = self._busy.pop(connection)
            try:
                heard.append((number, worker.answers.recv_bytes(), 0))
                self._idle.append(worker)
            except (EOFError, OSError):
                worker.process.wait()
                heard.append((number, None, worker.process.returncode))
                worker.stop()
        return heard

    def _opened(self, answer: bytes) -> dict[str, Any] | BaseException:
        """The summary in a worker's answer, or what the task raised."""
        summary, error, memory = pickle.loads(answer)
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory)
        return summary if error is None else error

    def close(self) -> None:
        """Ends all workers."""
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.stop()
        self._idle.clear()
        self._busy.clear()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
