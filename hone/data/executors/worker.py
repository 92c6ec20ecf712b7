"""A worker process of the processes executor: reads tasks, runs them, answers, and ends when its parent has died."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hone.data.executors.task import Function, Task, perform


def work(given: int, answers: int) -> None:
    """Runs the tasks read from file descriptor `given`, writes answers (summary, error, peak memory) to `answers`."""
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
