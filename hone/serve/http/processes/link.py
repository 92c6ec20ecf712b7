"""The front's handle of an engine in another process: requests in, outputs delivered, progress and death noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, Self

from hone.serve.http.processes.board import EngineReport, FrontBoard
from hone.serve.http.processes.wire import EngineInfo, FrameProtocol, OutputColumns, RefusedRequest, unpack
from hone.serve.request import Output, Request

_REASON_S = 12.0
"""Seconds within which the server says why an engine ended: it waits for that process to be gone, 5 s at a time."""


class TokenSink(Protocol):
    """A stream that takes a request's ordinary tokens itself."""

    def take(self, token: int, text: str, now: float) -> bool:
        """Keeps the event of a token for `flush`; False if it cannot now (then nothing is kept)."""

    def flush(self) -> None:
        """Sends what is kept."""


class EngineLink:
    """Handle of an engine in the HTTP process; every method is called from one event loop.

    Outputs are delivered to the `deliver` callable given with each submission, in order, on the event loop.
    """

    def __init__(self) -> None:
        self._frames: FrameProtocol
        self._why: asyncio.Future[str]
        self._first: asyncio.Future[Any] | None = None
        self._closing = False
        self._deliver: dict[str, Callable[[Output | RefusedRequest], None]] = {}
        self._streams: dict[str, TokenSink] = {}
        self._written: dict[TokenSink, None] = {}  # in order; those with bytes to send
        self._begun: set[str] = set()
        self._step_seconds: deque[float] = deque(maxlen=256)
        self._progress_at = time.monotonic()
        self._calls: dict[int, asyncio.Future[tuple[int, str]]] = {}
        self._num_calls = 0
        self._task: asyncio.Task[None] | None = None  # tells everyone that the process ended
        self.info: EngineInfo
        self.stats: dict[str, float] = {}
        self._stats_at = 0.0
        self.steps = 0
        self.death: str | None = None
        self._fronts = 1
        self._cause: str | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = self.fail_all
        """Called with why the engine ended: what becomes of its requests."""
        self.on_change: Callable[[int], None] = lambda outstanding: None
        """Called with `outstanding` when it may have changed."""
        self.on_held: Callable[[list[bytes]], None] = lambda keys: None
        """Called with the keys of prompts' pages that another front gave to this engine."""

    @classmethod
    async def connect(cls, sock: socket.socket, info: EngineInfo) -> Self:
        """The handle of an engine that runs already, at the other end of `sock`."""
        self = cls()
        self.info = info
        await self._open(sock)
        return self

    async def _open(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._why = loop.create_future()
        _, self._frames = await loop.create_connection(
            lambda: FrameProtocol(self._received, self._flush, self._lost), sock=sock
        )

    def share(self, board: FrontBoard, index: int, replica: int = 0) -> None:
        """Keeps the number of front `index`'s requests here on `board`."""
        self.on_change = partial(board.count, index, replica)
        self._fronts = board.fronts

    @property
    def outstanding(self) -> int:
        """Requests submitted to the engine and not finished."""
        return len(self._deliver)

    def submit(
        self,
        requests: list[Request],
        deliver: Callable[[Output | RefusedRequest], None],
        streams: Iterable[TokenSink] = (),
    ) -> None:
        """Submits `requests`; their outputs are passed to `deliver`, the last Output of each with `finish` set.

        `streams`, one a request if any, are offered ordinary tokens first.
        """
        if self.death is not None:
            for request in requests:
                deliver(Output(request.id, finish="error", error=self.death))
            return
        if not self._deliver:
            self._progress_at = time.monotonic()  # work starts now: idle time before is no stall
        for request in requests:
            self._deliver[request.id] = deliver
        self._streams.update(zip((request.id for request in requests), streams))
        self.on_change(len(self._deliver))
        self._frames.send(("add", requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; nothing more is delivered for them."""
        known = [request_id for request_id in request_ids if self._deliver.pop(request_id, None) is not None]
        self._begun.difference_update(known)
        for request_id in known:
            self._streams.pop(request_id, None)
        self.on_change(len(self._deliver))
        if known and self.death is None:
            self._frames.send(("abort", known))

    def tell(self, keys: list[bytes]) -> None:
        """Tells the engine's other fronts that it computes the pages with these keys."""
        self._frames.send(("held", keys))

    async def call(self, kind: str, what: tuple[Any, ...]) -> tuple[int, str]:
        """Has the engine do something between two steps: an HTTP status, and what went wrong unless it is 200."""
        if self.death is not None:
            return 500, self.death
        number = self._num_calls = self._num_calls + 1
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._frames.send((kind, (number, *what)))
        return await future

    def waiting(self) -> list[str]:
        """The ids of requests in the engine's queue, the oldest first."""
        running = self.info.max_num_seqs // self._fronts  # all of them, if the fronts have equally many
        unsure = list(self._deliver)[running:]  # a priority may have let a later one begin
        return [name for name in unsure if name not in self._begun]

    def hand_back(self, text: str) -> None:
        """Refuses (503) every request that waits in the engine's queue: those beyond the sequences that run at once."""
        waiting = {name: self._deliver[name] for name in self.waiting()}
        self.abort(waiting)
        for name, deliver in waiting.items():
            deliver(RefusedRequest(name, text, 503))

    def take_back(self) -> list[str]:
        """Takes away the requests of which nothing was delivered yet; returns their ids."""
        waiting = [name for name in self._deliver if name not in self._begun]
        self.abort(waiting)
        return waiting

    def fail_all(self, text: str) -> None:
        """Ends every outstanding request with an error and aborts it in the engine."""
        waiting = dict(self._deliver)
        self.abort(list(waiting))
        for request_id, deliver in waiting.items():
            deliver(Output(request_id, finish="error", error=text))

    @property
    def heard(self) -> tuple[EngineReport, ...]:
        """What the engine said last."""
        return (EngineReport(self.steps, self._stats_at, self.stats),)

    @property
    def last_progress_s(self) -> float:
        """Seconds since the engine last finished a step or received work while idle."""
        return time.monotonic() - self._progress_at

    def trouble(self, stall_s: float) -> str | None:
        """Why the engine is unhealthy: it died, or work waits and no step ended for max(`stall_s`, 20 median steps)."""
        if self.death is not None:
            return self.death
        median_s = statistics.median(self._step_seconds) if self._step_seconds else 0.0
        limit_s = max(stall_s, 20 * median_s)
        if self._deliver and self.last_progress_s > limit_s:
            return (
                f"{len(self._deliver)} requests are waiting and no step ended for {self.last_progress_s:.1f} s "
                f"(limit {limit_s:.1f} s)"
            )
        return None

    async def stop(self) -> None:
        """Closes the connection."""
        self._closing = True
        self._frames.close()

    def ended(self, text: str) -> None:
        """Says why the engine's process ended, for `death`."""
        if not self._why.done():
            self._why.set_result(text)

    async def _reason(self) -> str:
        """Why the engine's process ended: what `ended` says within a moment."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._why), _REASON_S)
        return f"the engine process ended: {self._cause or 'see the server log'}"

    def _received(self, message: tuple[Any, ...]) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(message)
        else:
            self._take(*message)

    def _lost(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(EOFError())
        elif not self._closing:
            self._task = asyncio.ensure_future(self._died())

    async def _died(self) -> None:
        self.death = await self._reason()
        for number in list(self._calls):
            self._told(number, 500, self.death)
        self.on_lost(self.death)
        self.on_death()

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "step":
            self.steps, seconds, columns, others = rest
            self._step_seconds.append(seconds)
            self._progress_at = now = time.monotonic()
            self._take_tokens(columns, now)
            for output in unpack(([], [], []), others):
                self._pass_on(output)
        elif kind == "stats":
            self.stats, steps, self._stats_at = rest
            if steps != self.steps:  # steps without outputs for this front
                self.steps, self._progress_at = steps, time.monotonic()
        elif kind == "held":
            self.on_held(rest[0])
        elif kind == "lost":
            (self._cause,) = rest
        elif kind == "told":
            self._told(*rest)
        else:
            assert kind == "refused", f"unknown message {kind!r}"
            (refused,) = rest
            self._streams.pop(refused.request_id, None)
            deliver = self._deliver.pop(refused.request_id, None)
            if deliver is not None:
                deliver(refused)

    def _told(self, number: int, status: int, said: str) -> None:
        future = self._calls.pop(number)
        if not future.done():  # the client may have gone
            future.set_result((status, said))

    def _take_tokens(self, columns: OutputColumns, now: float) -> None:
        streams, written = self._streams, self._written
        for name, token, text in zip(*columns):
            stream = streams.get(name)
            if stream is not None and stream.take(token, text, now):
                written[stream] = None
            else:
                self._pass_on(Output(name, [token], text))

    def _pass_on(self, output: Output) -> None:
        name = output.request_id
        deliver = self._deliver.get(name)
        if deliver is None:
            return  # aborted during the step
        stream = self._streams.get(name)
        if stream is not None:
            stream.flush()  # what comes now is sent after it
        if output.finish is not None:
            del self._deliver[name]
            self._streams.pop(name, None)
            self._begun.discard(name)
        elif name not in self._begun:
            self._begun.add(name)
        deliver(output)

    def _flush(self) -> None:
        """Sends what the streams were given, each in one write."""
        for stream in self._written:
            stream.flush()
        self._written.clear()
        self.on_change(len(self._deliver))
