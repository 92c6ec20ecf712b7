"""Engines that come and go behind one front: a request is given to those that are there, and goes on elsewhere when one ends."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

from hone.serve.http.processes.board import EngineReport, FrontBoard
from hone.serve.http.processes.link import EngineLink, TokenSink
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.processes.wire import EngineInfo, RefusedRequest
from hone.serve.replicas.router import Router
from hone.serve.request import Output, Request

Deliver = Callable[[Output | RefusedRequest], None]


class _Asked(NamedTuple):
    """A request in progress, for another replica if its own ends before it has answered."""

    request: Request
    deliver: Deliver
    sink: TokenSink | None


class ElasticReplicas(Replicas):
    """`links` by their places among all that there may be. `info` is of any engine of the model.

    While no replica takes requests they are held. When a replica ends, requests of which nothing was delivered are given to others;
    those that have begun end with an error, because their client has the first tokens already.
    """

    def __init__(self, links: dict[int, EngineLink], router: Router, info: EngineInfo, *, tells: bool) -> None:
        super().__init__([], router, tells=tells)
        self._by_place: dict[int, EngineLink] = {}
        self._active: set[int] = set()
        self._info = info
        self._asked: dict[str, _Asked] = {}
        self._held: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._board: FrontBoard | None = None
        self._index = 0
        for place in range(router.places):
            router.retire(place)
        for place, link in links.items():
            self._add(place, link)

    # ---- what the supervisor says -----------------------------------------------------------------------------------

    def told(self, what: tuple[Any, ...], parent: Connection) -> None:
        """Does what the supervisor says: an engine is there ("engine", its place and info, then its socket), gets no request any more
        ("retire"; answered with "retired"), is gone ("close"), or has ended ("lost", with the reason)."""
        kind, place, *rest = what
        if kind == "engine":
            sock = socket.socket(fileno=recv_handle(parent))
            task = asyncio.ensure_future(self._connect(place, sock, rest[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif kind == "retire":
            self._active.discard(place)
            self._router.retire(place)
            parent.send(("retired", place))
        elif place in self._by_place:
            if kind == "lost":
                self._by_place[place].ended(rest[0])
            else:
                self._forget(place)

    async def _connect(self, place: int, sock: socket.socket, info: EngineInfo) -> None:
        self._add(place, await EngineLink.connect(sock, info))

    def _add(self, place: int, link: EngineLink) -> None:
        self._by_place[place] = link
        self._links = list(self._by_place.values())
        self._active.add(place)
        self._router.admit(place)
        link.on_held = partial(self._learn, place)
        link.on_lost = partial(self._lost, place, link)
        if self._board is not None:
            link.share(self._board, self._index, place)
        held, self._held = list(self._held), {}
        self._give([self._asked[name] for name in held])
        self._relieve(place, link)

    def _relieve(self, place: int, link: EngineLink) -> None:
        """A new engine takes what it can run at once of the requests that wait at the others, the newest of each queue first."""
        room = link.info.max_num_seqs - link.outstanding
        for other in [self._by_place[one] for one in self._active if one != place]:
            names = [name for name in other.waiting() if name in self._asked][::-1][: max(0, room)]
            room -= len(names)
            other.abort(names)
            for one in [self._asked[name] for name in reversed(names)]:
                link.submit([one.request], self._deliver, [] if one.sink is None else [one.sink])

    def _learn(self, place: int, keys: list[bytes]) -> None:
        if place in self._active:
            self._router.learn(keys, place)

    def _forget(self, place: int) -> EngineLink:
        link = self._by_place.pop(place)
        self._links = list(self._by_place.values())
        self._active.discard(place)
        self._router.retire(place)
        task = asyncio.ensure_future(link.stop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    def _lost(self, place: int, link: EngineLink, why: str) -> None:
        """An engine has ended: what it had not begun to answer is given to others."""
        if self._by_place.get(place) is link:
            self._forget(place)
        again = [self._asked[name] for name in link.take_back() if name in self._asked]
        link.fail_all(f"replica {place}: {why}")
        self._give(again)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def share(self, board: FrontBoard, index: int) -> None:
        """Keeps the numbers of front `index` on `board`."""
        self._board, self._index = board, index
        for place, link in self._by_place.items():
            link.share(board, index, place)

    def submit(self, requests: list[Request], deliver: Deliver, streams: Iterable[TokenSink] = ()) -> None:
        """As `EngineLink.submit`; copies of a prompt go to one replica, where they share it."""
        sinks = dict(zip((request.id for request in requests), streams))
        asked = [_Asked(request, deliver, sinks.get(request.id)) for request in requests]
        self._asked.update((one.request.id, one) for one in asked)
        self._give(asked)

    def _give(self, asked: list[_Asked]) -> None:
        if not self._active:
            self._held.update(dict.fromkeys(one.request.id for one in asked))
            return
        groups: dict[tuple[int, str], list[_Asked]] = defaultdict(list)
        for one in asked:
            groups[id(one.request.prompt), one.request.kept_apart_by].append(one)
        for group in groups.values():
            first = group[0].request
            place, keys = self._router.place(first.prompt, first.kept_apart_by)
            link = self._by_place[place]
            sinks = [one.sink for one in group if one.sink is not None]
            link.submit([one.request for one in group], self._deliver, sinks)
            if self._tells and keys:
                link.tell(keys)

    def _deliver(self, output: Output | RefusedRequest) -> None:
        over = isinstance(output, RefusedRequest) or output.finish is not None
        asked = self._asked.pop(output.request_id, None) if over else self._asked.get(output.request_id)
        if asked is not None:
            asked.deliver(output)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests."""
        names = list(request_ids)
        for name in names:
            self._asked.pop(name, None)
            self._held.pop(name, None)
        super().abort(names)

    def hand_back(self, text: str) -> None:
        """Refuses (503) what waits in any engine's queue, or for an engine."""
        for name in list(self._held):
            self._held.pop(name)
            self._deliver(RefusedRequest(name, text, 503))
        super().hand_back(text)

    def fail_all(self, text: str) -> None:
        """Ends every outstanding request with an error."""
        for name in list(self._held):
            self._held.pop(name)
            self._deliver(Output(name, finish="error", error=text))
        super().fail_all(text)

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """Those of one engine, with the sequences of all that take requests."""
        count = sum(self._by_place[place].info.max_num_seqs for place in self._active)
        return dataclasses.replace(self._info, max_num_seqs=count)

    @property
    def outstanding(self) -> int:
        """Requests submitted and not finished, those that wait for an engine included."""
        return super().outstanding + len(self._held)

    @property
    def last_progress_s(self) -> float:
        """As `Replicas.last_progress_s`; 0 without an engine."""
        return super().last_progress_s if self._links else 0.0

    @property
    def heard(self) -> tuple[EngineReport, ...]:
        """What the engine in each place said last; nothing of one that is not there."""
        there = self._by_place
        return tuple(
            there[place].heard[0] if place in there else EngineReport() for place in range(self._router.places)
        )

    @property
    def death(self) -> str | None:
        """The end of one engine does not end the server."""
        return None

    @property
    def on_death(self) -> Callable[[], None]:
        """Never called."""
        return lambda: None

    @on_death.setter
    def on_death(self, call: Callable[[], None]) -> None:
        pass

    def trouble(self, stall_s: float) -> str | None:
        """Why one of the engines is unhealthy, or that there is none."""
        if not self._active:
            return "no replica takes requests"
        for place, link in self._by_place.items():
            if link.death is None and (found := link.trouble(stall_s)) is not None:
                return f"replica {place}: {found}"
        return None
