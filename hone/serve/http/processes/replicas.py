"""Several engines behind one front: the handle that gives each request to a replica and is otherwise like one engine's."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property

from hone.serve.http.processes.board import EngineReport, FrontBoard
from hone.serve.http.processes.link import EngineLink, TokenSink
from hone.serve.http.processes.wire import EngineInfo, RefusedRequest
from hone.serve.replicas.router import Router
from hone.serve.request import Output, Request


class Replicas:
    """`links` to engines of the same model. With `tells`, other fronts hear of what each replica will hold."""

    def __init__(self, links: list[EngineLink], router: Router, *, tells: bool) -> None:
        self._links = links
        self._router = router
        self._tells = tells
        for place, link in enumerate(links):
            link.on_held = lambda keys, place=place: router.learn(keys, place)

    @cached_property
    def info(self) -> EngineInfo:
        """Those of one engine, with the sequences of all."""
        info = self._links[0].info
        return dataclasses.replace(info, max_num_seqs=sum(link.info.max_num_seqs for link in self._links))

    def share(self, board: FrontBoard, index: int) -> None:
        """Keeps the numbers of front `index` on `board`."""
        for replica, link in enumerate(self._links):
            link.share(board, index, replica)

    def submit(
        self,
        requests: list[Request],
        deliver: Callable[[Output | RefusedRequest], None],
        streams: Iterable[TokenSink] = (),
    ) -> None:
        """As `EngineLink.submit`; copies of a prompt go to one replica, where they share it."""
        sinks = dict(zip((request.id for request in requests), streams))
        groups: dict[tuple[int, str], list[Request]] = defaultdict(list)
        for request in requests:
            groups[id(request.prompt), request.kept_apart_by].append(request)
        for group in groups.values():
            place, keys = self._router.place(group[0].prompt, group[0].kept_apart_by)
            link = self._links[place]
            link.submit(group, deliver, [sinks[request.id] for request in group] if sinks else ())
            if self._tells and keys:
                link.tell(keys)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests."""
        names = list(request_ids)
        for link in self._links:
            link.abort(names)

    def hand_back(self, text: str) -> None:
        """Refuses (503) what waits in any engine's queue."""
        for link in self._links:
            link.hand_back(text)

    def fail_all(self, text: str) -> None:
        """Ends every outstanding request with an error."""
        for link in self._links:
            link.fail_all(text)

    @property
    def outstanding(self) -> int:
        """Requests submitted to any engine and not finished."""
        return sum(link.outstanding for link in self._links)

    @property
    def steps(self) -> int:
        """Steps of all engines."""
        return sum(link.steps for link in self._links)

    @property
    def last_progress_s(self) -> float:
        """Of the engine that has work and has been longest without progress; of idle ones the latest."""
        busy = [link.last_progress_s for link in self._links if link.outstanding]
        return max(busy) if busy else min(link.last_progress_s for link in self._links)

    @property
    def heard(self) -> tuple[EngineReport, ...]:
        """What each engine said last."""
        return tuple(heard for link in self._links for heard in link.heard)

    @property
    def death(self) -> str | None:
        """Why the server cannot go on: one engine has ended."""
        return next((link.death for link in self._links if link.death is not None), None)

    @property
    def on_death(self) -> Callable[[], None]:
        """Called when an engine has ended."""
        return self._links[0].on_death

    @on_death.setter
    def on_death(self, call: Callable[[], None]) -> None:
        for link in self._links:
            link.on_death = call

    def trouble(self, stall_s: float) -> str | None:
        """Why one of the engines is unhealthy."""
        for place, link in enumerate(self._links):
            if (found := link.trouble(stall_s)) is not None:
                return f"replica {place}: {found}"
        return None

    async def stop(self) -> None:
        """Closes the connections."""
        for link in self._links:
            await link.stop()
