"""Ranks that work together, as torchrun would start them: processes forked from one that has imported what they need."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from tests.forking import Ended, begin


def together(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """`function` of `arguments` on every rank, in a process each; results are what JSON can hold."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [one() for one in [begin(_rank, (rank, num_ranks, port, function, arguments)) for rank in range(num_ranks)]]


def _rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: tuple) -> Any:
    """What rank `rank` does, with the environment that torchrun gives it."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    return function(*arguments)
