"""Ranks that work together, as torchrun would start them: processes forked from one that has imported what they need."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.forking import Ended, begin


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that the system gives to nobody else inside, where rank 0 may listen.

    The socket that has it does not listen, and both say that addresses may be used again: so rank 0 can bind it beside.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def together(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """`function` of `arguments` on every rank, in a process each; results are what JSON can hold."""
    with reserved_port() as port:
        begun = [begin(_rank, (rank, num_ranks, port, function, arguments)) for rank in range(num_ranks)]
        return [one() for one in begun]


def _rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: tuple) -> Any:
    """What rank `rank` does, with the environment that torchrun gives it."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    return function(*arguments)
