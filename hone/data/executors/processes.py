"""The processes executor: fresh Python processes on this machine, replaced when they die, and what such a process does."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hone.data.executors.base import Executor, Outcome, Pool, RunAhead
from hone.data.executors.task import Function, Task, perform
from hone.measure.topology.pin import bind, shares_for_children
from hone.measure.topology.placement import ONE_NODE, Share

ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COMMAND = "import sys; sys.path[:] = {path!r}; from hone.data.executors.processes import work; work({given}, {answers}, {share!r})"


class Processes(Executor):
    """Runs tasks in single-threaded processes of this machine; when one dies, it is replaced and its task retried."""

    @contextmanager
    def open(self) -> Iterator[Pool]:
        workers = self.workers or _cores()
        shares, why = shares_for_children(workers)
        if why and why != ONE_NODE:
            warnings.warn(f"workers on NUMA nodes: {why}", stacklevel=3)
        pool = _Processes(workers, shares)
        try:
            yield pool
        finally:
            pool.close()


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process, started without running the main module again, so that scripts need no `if __name__` guard."""

    def __init__(self, share: Share | None = None) -> None:
        self.share = share
        given, self._given = os.pipe()
        answers, theirs = os.pipe()
        command = _COMMAND.format(path=sys.path, given=given, answers=theirs, share=share and astuple(share))
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
    def __init__(self, workers: int, shares: Sequence[Share | None]) -> None:
        super().__init__(workers)
        self._shares = [*shares]
        """Of workers that are not there yet, or are no more."""
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def has_room(self) -> bool:
        return len(self._busy) < self.workers

    def start(self, number: int, function: Function, task: Task, rescue: bool) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._shares.pop(0))
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
                self._shares.append(worker.share)
        return outcomes

    def give_up(self) -> None:
        for worker, _ in self._busy.values():  # after an error, or when the caller stopped early
            worker.stop()
            self._shares.append(worker.share)
        self._busy.clear()

    def close(self) -> None:
        """Ends all workers."""
        self.give_up()
        for worker in self._idle:
            worker.stop()
            self._shares.append(worker.share)
        self._idle.clear()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def work(given: int, answers: int, share: tuple[Any, ...] | None = None) -> None:
    """Runs the tasks read from file descriptor `given`, writes answers (summary, error, peak memory) to `answers`.

    `share` are the fields of this process's `Share` of the machine: it binds itself before it allocates anything.
    """
    bind(Share(*share) if share else None)
    tasks, replies = Connection(given, writable=False), Connection(answers, readable=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and stops its workers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            function, task = pickle.loads(tasks.recv_bytes())
        except (EOFError, OSError):
            return
        replies.send_bytes(answered(function, task))


def answered(function: Function, task: Task) -> bytes:
    """The pickled (summary, error, peak memory) of a task that is done here."""
    summary, error = None, None
    try:
        summary = perform(function, task)
    except BaseException as raised:
        error = portable(raised)
    try:
        return pickle.dumps((summary, error, peak_memory_bytes()))
    except Exception as raised:  # an error that cannot be pickled must not look like a dead worker
        return pickle.dumps((None, portable(raised), peak_memory_bytes()))


def portable(error: BaseException) -> BaseException:
    """`error` with its traceback as a note, or an error with its text when it cannot be pickled."""
    told = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error.with_traceback(None)))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker:\n{told}")
    return error


def peak_memory_bytes() -> int:
    """This process's peak memory."""
    with suppress(OSError, IndexError, ValueError):  # Linux: getrusage would include the parent's memory
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent was killed: nobody reads the result, and another run may start the same task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
