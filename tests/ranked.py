"""Ranks that work together, as torchrun would start them: processes forked from one that has imported what they need."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tests.forking import Ended


def together(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """`function` of `arguments` on every rank, in a process each; results are what JSON can hold."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = []
    for rank in range(num_ranks):
        results, errors = (tempfile.TemporaryFile("w+") for _ in range(2))
        pid = os.fork()
        if not pid:
            os.dup2(errors.fileno(), 2)
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in where.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
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
        begun.append((pid, results, errors))
    ended = []
    for pid, results, errors in begun:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results.seek(0)
        errors.seek(0)
        ended.append(Ended(status, json.load(results) if status == 0 else None, errors.read()))
    return ended
