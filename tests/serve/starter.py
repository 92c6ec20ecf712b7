"""Starts servers by a fork of one process that has imported them, and their engines and fronts by a fork of the server.

`python -m tests.serve.starter` reads calls from the socket that is its standard input. Only how a process begins differs
from `hone serve`: it holds the descriptors it is given and no other, and ends in the same ways.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import context, util
from typing import Any, NoReturn


class Forked(context.ForkProcess):  # type: ignore[name-defined,misc]
    """Takes the place of `SpawnProcess`: as that one it inherits no sockets but its arguments', and no signal handlers."""

    def run(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kept, nothing = {*_descriptors(self._args)}, os.open(os.devnull, os.O_RDWR)
        for one in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # the listing's own
                if stat.S_ISSOCK(os.fstat(one).st_mode):
                    os.dup2(nothing, one)  # the number stays taken: objects of the parent would close another's
        super().run()


def _descriptors(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _descriptors(value)
        elif hasattr(value, "fileno"):
            yield value.fileno()


def main() -> None:
    """Reads calls until the caller has ended."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the servers; this process ends with its caller
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, kept, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return
        call = json.loads(data)
        for name in call["imports"]:
            importlib.import_module(name)
        gc.freeze()
        if not os.fork():
            control.close()
            _watch(call, *kept)
        for one in kept:
            os.close(one)


def _watch(call: dict[str, Any], stdout: int, stderr: int, told: int) -> NoReturn:
    """Runs the call in a process of its own; writes its id and its exit code to `told`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(stdout)
        os.close(stderr)
        os.write(told, f"{pid}\n".encode())
        os.write(told, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for one in (stdout, stderr, told):
        os.close(one)
    os.environ.clear()
    os.environ.update(call["environment"])
    context.SpawnContext.Process = Forked  # type: ignore[misc,assignment]
    status = 1
    try:
        exec(call["code"], {"__name__": "server"})
        status = 0
    except SystemExit as error:
        print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an orderly end of the interpreter would copy all that was imported


if __name__ == "__main__":
    for name in ("fastapi", "uvicorn", "hone.serve.http.processes.one_front", "hone.serve.http.processes.supervisor"):
        importlib.import_module(name)
    main()
