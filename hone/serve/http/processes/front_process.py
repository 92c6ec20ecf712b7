"""A front in a process of its own, beside others on the same port: what the supervisor starts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hone.base.errors import HoneError
from hone.base.run import Run
from hone.serve.http.processes.board import FrontBoard
from hone.serve.http.processes.elastic_replicas import ElasticReplicas
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.one_front import OneFront, Stopping
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.processes.wire import EngineInfo
from hone.serve.http.spec import ServerSpec
from hone.serve.replicas.router import Router


@dataclass
class FrontOrder:
    """What a front needs besides its sockets; `info` has one entry for each replica of the engine."""

    folder: str
    spec: ServerSpec
    index: int
    info: list[EngineInfo]
    board: FrontBoard
    device: str = "cpu"
    quiet: bool = False
    places: list[int] = field(default_factory=list)
    """The place of each of these replicas among those that there may be."""


def front_main(order: FrontOrder, listener: socket.socket, engines: list[socket.socket], parent: Connection) -> None:
    """Entry of the process. Sends "ready" to `parent`, or the HoneError that it ends with; ends when `parent` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # reaches the whole process group; the parent tells what to do
    try:
        asyncio.run(_front(order, listener, engines, parent))
    except HoneError as error:
        parent.send(error)
        raise SystemExit(2) from None


def _router(order: FrontOrder, places: int) -> Router:
    """What chooses among replicas in so many places."""
    info, processes = order.info[0], order.spec.processes
    return Router(
        places,
        order.board.outstanding,
        block_size=info.block_size,
        max_keys=places * info.num_pages,
        abs_threshold=processes.balance_abs_threshold,
        rel_threshold=processes.balance_rel_threshold,
    )


async def _front(order: FrontOrder, listener: socket.socket, engines: list[socket.socket], parent: Connection) -> None:
    loop = asyncio.get_running_loop()
    front = OneFront(Path(order.folder), order.spec, Run(device=order.device, quiet=order.quiet))
    links = [await EngineLink.connect(sock, info) for sock, info in zip(engines, order.info, strict=True)]
    engine: EngineLink | Replicas | ElasticReplicas = links[0]
    elastic: ElasticReplicas | None = None
    if order.spec.processes.autoscaler is not None:
        by_place = dict(zip(order.places, links, strict=True))
        most = order.board.replicas
        engine = elastic = ElasticReplicas(by_place, _router(order, most), order.info[0], tells=order.board.fronts > 1)
    elif len(links) > 1:
        engine = Replicas(links, _router(order, len(links)), tells=order.board.fronts > 1)
    engine.share(order.board, order.index)

    def ready(stopping: Stopping) -> None:
        def told() -> None:
            try:
                what = parent.recv()
            except (EOFError, OSError):
                os._exit(1)  # the parent was killed
            if isinstance(what, tuple):
                assert elastic is not None, "the number of replicas is fixed"
                elastic.told(what, parent)
            elif what == "drain":
                stopping.drain()
            elif what == "interrupt":
                stopping.interrupt()
            else:  # why an engine ended, whose connection is lost, too
                for link in links:
                    link.ended(what)

        loop.add_reader(parent.fileno(), told)
        parent.send("ready")

    try:
        await front.run(engine, listener, ready, order.board, order.index)
    finally:
        loop.remove_reader(parent.fileno())
