"""Processes that may be killed, without the imports of each: one process imports, and forks for every call.

It is forked before it has any thread of its own. `python -m tests.forking MODULE:FUNCTION` reads the arguments of a
call from each line of standard input, as JSON, and writes [return code, result, standard error] as a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    """How a process ended; `result` is None unless `returncode` is 0."""

    returncode: int
    result: Any
    stderr: str


@contextmanager
def forking(function: str) -> Iterator[Callable[..., Ended]]:
    """Calls 'MODULE:FUNCTION' in a process each; arguments and results are what JSON can hold."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.forking", function]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as parent:

        def call(*arguments: Any) -> Ended:
            print(json.dumps(arguments, default=str), file=parent.stdin, flush=True)
            return Ended(*json.loads(parent.stdout.readline()))

        yield call
        parent.stdin.close()


def begin(function: Callable[..., Any], arguments: Iterable[Any]) -> Callable[[], Ended]:
    """Calls `function` in a forked process; what is returned waits for its end."""
    results, errors = (tempfile.TemporaryFile("w+") for _ in range(2))
    pid = os.fork()
    if not pid:
        gc.freeze()  # garbage collection here does not visit what the imports of the first process made
        os.dup2(errors.fileno(), 2)
        status = 1
        try:
            json.dump(function(*arguments), results)
            results.flush()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)

    def ended() -> Ended:
        with results, errors:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            results.seek(0)
            errors.seek(0)
            return Ended(status, json.load(results) if status == 0 else None, errors.read())

    return ended


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        print(json.dumps(begin(function, json.loads(line))()), flush=True)
