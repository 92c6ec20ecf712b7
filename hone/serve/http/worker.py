"""The engine in its own process: the loop that runs its steps, for one front or several, and the process's start and end.

A socket pair for each front carries length-prefixed pickles in both directions. A step's message is also the heartbeat: it
has the step counter, so that the HTTP process can tell a busy engine from a stuck one without a query.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from hone.base.errors import HoneError, MachineError
from hone.measure.clocks.held import restore_all
from hone.serve.device.heap import frozen_heap
from hone.serve.http.processes.adapter_calls import CALLS, AdapterCalls
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.wire import Channel, EngineInfo, QueuedChannel, RefusedRequest, pack
from hone.serve.ranks.errors import RankError
from hone.serve.request import BusyError, Output, Request

_STATS_EVERY_S = 0.25
_FAILURES_IN_A_ROW = 3
AFTER_DEATH = "see its last lines above, then start the server again (smaller --engine.* if memory ran out)"
"""The way out when the engine's process has ended."""


class EngineLike(Protocol):
    """The interface of an engine that the loop uses; `hone.serve.engine.Engine` and the tests' fakes implement it."""

    has_work: bool

    def idle(self) -> bool: ...
    def when_lost(self, say: Callable[[RankError], None]) -> None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> dict[str, float]: ...


Build = Callable[..., tuple[EngineLike, EngineInfo]]
"""Builds the engine inside the worker: a module-level function (it is pickled by name)."""


# ---- inside the worker process -------------------------------------------------------------------------------------


def worker_main(
    sock: socket.socket,
    build: Build,
    options: dict[str, Any],
    doors: socket.socket | None = None,
    max_queue: int | None = None,
) -> None:
    """Entry of the worker process: builds the engine, reports ready, then runs steps until the parent ends.

    Requests come over `sock`, or with `doors` over a socket of each front that the parent sends there; all fronts
    together may then have `max_queue` sequences waiting.
    """
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; the parent drains, then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(sock)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()
    try:
        engine, info = build(**options)
    except HoneError as error:
        channel.send(("failed", error))
        return
    except BaseException as error:
        traceback.print_exc()
        channel.send(("failed", MachineError(f"the engine did not start: {_one_line(error)}", fix="see the traceback")))
        return
    loop = Loop(
        engine,
        None if doors is not None else channel,
        inbox,
        None if max_queue is None else info.max_num_seqs + max_queue,
    )

    def lost(error: RankError) -> None:
        for one in {channel, *loop.fronts}:
            one.send(("lost", str(error.what)))

    channel.send(("ready", info))
    if doors is not None:
        threading.Thread(target=_open_doors, args=(doors, inbox), daemon=True).start()
    try:
        engine.when_lost(lost)
        loop.run()
    except BrokenPipeError:
        return
    except RankError as error:
        lost(error)
        if doors is not None:
            time.sleep(0.2)  # the fronts' queues are sent by threads
        restore_all()
        os._exit(3)  # a kernel that waits for a lost rank would hold up an orderly end


def _receive(channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
    """Reads messages from the socket at once, so that the parent never waits for a step; exits when the parent ends."""
    while True:
        try:
            inbox.put(channel.receive())
        except (EOFError, OSError):
            os._exit(0)  # the parent has ended: the current step is not needed


def _open_doors(doors: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """Takes the socket of every front that the parent starts."""
    while True:
        _, handles, _, _ = socket.recv_fds(doors, 1, 1)
        if not handles:
            return
        channel = QueuedChannel(socket.socket(fileno=handles[0]))
        inbox.put(("join", [], channel))
        threading.Thread(target=_receive_front, args=(channel, inbox), daemon=True).start()


def _receive_front(channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put((*channel.receive(), channel))
    except (EOFError, OSError):
        inbox.put(("gone", [], channel))


class Loop:
    """Adds and aborts requests, runs steps, reports. An exception in a step fails its requests, not the process.

    `channel` leads to the only front; without it fronts join and leave. What a front that is gone asked for is aborted.
    """

    def __init__(
        self, engine: EngineLike, channel: Channel | None, inbox: queue.SimpleQueue[Any], limit: int | None = None
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._inbox = inbox
        self._adapter_calls = AdapterCalls(getattr(engine, "adapters", None), inbox)
        self._limit = limit
        self.fronts: list[Channel] = [] if channel is None else [channel]
        self._live: dict[str, Channel] = {}  # each request's front
        self._steps = 0
        self._failures = 0
        self._stats_at = 0.0

    def run(self) -> None:
        """Runs until the process is ended from outside. Raises the engine's exception when it fails repeatedly."""
        with frozen_heap():
            self._loop()

    def _loop(self) -> None:
        while True:
            self._take_messages()
            if not self._engine.has_work:
                if self._inbox.empty() and self._engine.idle():
                    continue
                self._send_stats()
                self._handle(self._inbox.get())
                continue
            started = time.monotonic()
            outputs = self._step()
            self._steps += 1
            self._report(outputs, time.monotonic() - started)
            if time.monotonic() - self._stats_at > _STATS_EVERY_S:
                self._send_stats()

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    def _report(self, outputs: list[Output], seconds: float) -> None:
        """Sends each front the outputs of its requests; the only one hears of every step."""
        shares: dict[Channel, list[Output]] = {} if self._channel is None else {self._channel: outputs}
        for output in outputs:
            if self._channel is None and (front := self._live.get(output.request_id)) is not None:
                shares.setdefault(front, []).append(output)
            if output.finish is not None:
                self._live.pop(output.request_id, None)
        for front, share in shares.items():
            front.send(("step", self._steps, seconds, *pack(share)))

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, items, *origin = message
        front: Any = origin[0] if origin else self._channel
        if kind == "join":
            self.fronts.append(front)
            front.send(("stats", self._engine.stats(), self._steps, time.monotonic()))
        elif kind == "gone":
            self.fronts.remove(front)
            self._abort([request_id for request_id, owner in self._live.items() if owner is front])
        elif kind == "held":
            for other in self.fronts:
                if other is not front:
                    other.send(("held", items))
        elif kind == "abort":
            self._abort(items)
        elif kind in CALLS:
            self._adapter_calls.handle(kind, items, front)
        else:
            assert kind == "add", f"unknown message {kind!r}"
            for request in items:
                self._add(request, front)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._live.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _add(self, request: Request, front: Channel) -> None:
        try:
            if self._limit is not None and len(self._live) >= self._limit:
                raise BusyError(f"{len(self._live)} sequences are in progress", fix="try again in a moment")
            self._engine.add(request)
        except BusyError as error:
            front.send(("refused", RefusedRequest(request.id, str(error), 503)))
        except HoneError as error:
            front.send(("refused", RefusedRequest(request.id, str(error), 400)))
        except Exception as error:
            traceback.print_exc()
            front.send(("refused", RefusedRequest(request.id, f"internal error: {_one_line(error)}", 500)))
        else:
            self._live[request.id] = front

    def _step(self) -> list[Output]:
        try:
            outputs = self._engine.step()
        except RankError:
            raise  # no step is possible any more
        except Exception as error:
            traceback.print_exc()
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            text = f"internal error: {_one_line(error)}"
            for request_id in self._live:
                self._engine.abort(request_id)
            return [Output(request_id, finish="error", error=text) for request_id in self._live]
        self._failures = 0
        return outputs

    def _send_stats(self) -> None:
        self._stats_at = time.monotonic()
        stats = self._engine.stats()
        for front in self.fronts:
            front.send(("stats", stats, self._steps, self._stats_at))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# ---- inside the HTTP process ---------------------------------------------------------------------------------------


class EngineProcess(EngineLink):
    """The handle of an engine whose process belongs to this one: it starts and ends here."""

    def __init__(self, process: Any) -> None:
        super().__init__()
        self._process = process

    @classmethod
    async def start(cls, build: Build, options: dict[str, Any]) -> EngineProcess:
        """Spawns the worker and waits until its engine is built. Raises the HoneError of a failed start."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=worker_main, args=(theirs, build, options), name="hone-engine", daemon=True)
        process.start()
        theirs.close()
        self = cls(process)
        self._first = asyncio.get_running_loop().create_future()
        await self._open(ours)
        try:
            kind, what = await self._first
        except EOFError:
            raise MachineError(
                f"the engine process ended while it started: {exit_of(process)}", fix="see its last lines"
            ) from None
        except BaseException:  # Ctrl-C while the model loads
            process.kill()
            raise
        if kind == "failed":
            process.join(5)
            raise what
        self.info = what
        return self

    async def stop(self) -> None:
        """Ends the worker and waits for it."""
        await super().stop()
        await asyncio.to_thread(self._process.join, 2)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, 5)

    async def _reason(self) -> str:
        exit_ = await asyncio.to_thread(exit_of, self._process)
        text = f"the engine process ended: {self._cause or exit_}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        return text


def exit_of(process: Any) -> str:
    """How `process` ended; waits for that up to 5 s."""
    process.join(5)
    code = process.exitcode
    if code is None:
        return "it closed its socket but still runs"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
