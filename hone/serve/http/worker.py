"""The engine in its own process: the loop that runs its steps, and the HTTP process's handle of it.

A socket pair carries length-prefixed pickles in both directions. A step's message is also the heartbeat: it has the step
counter, so that the HTTP process can tell a busy engine from a stuck one without a query.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Protocol

from hone.base.errors import HoneError, MachineError
from hone.serve.request import BusyError, Output, Request

_LENGTH = struct.Struct("!Q")
_STATS_EVERY_S = 0.25
_FAILURES_IN_A_ROW = 3


class EngineLike(Protocol):
    """The interface of an engine that the loop uses; `hone.serve.engine.Engine` and the tests' fakes implement it."""

    has_work: bool

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the engine that the HTTP process needs before it accepts requests."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    sizes: str = ""
    """The engine's sizes in one line, to be printed once."""


Build = Callable[..., tuple[EngineLike, EngineFacts]]
"""Builds the engine inside the worker: a module-level function (it is pickled by name)."""


@dataclass
class Refused:
    """A request rejected by the engine: invalid (`status` 400), queue full (503), internal error (500)."""

    request_id: str
    message: str
    status: int


_values_of = attrgetter(*(field.name for field in fields(Output)))


def pack(outputs: list[Output]) -> list[tuple[Any, ...]]:
    """`outputs` as plain tuples, which pickle twice as fast: significant for hundreds of sequences per step."""
    return [_values_of(output) for output in outputs]


def unpack(packed: list[tuple[Any, ...]]) -> list[Output]:
    """The inverse of `pack`."""
    return [Output(*values) for values in packed]


# ---- inside the worker process -------------------------------------------------------------------------------------


class Channel:
    """Blocking, framed pickles over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other side has closed the socket."""
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        return pickle.loads(self._file.read(_LENGTH.unpack(head)[0]))


def worker_main(sock: socket.socket, build: Build, options: dict[str, Any]) -> None:
    """Entry of the worker process: builds the engine, reports ready, then runs steps until the parent ends."""
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; the parent drains, then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(sock)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()
    try:
        engine, facts = build(**options)
    except HoneError as error:
        channel.send(("failed", error))
        return
    except BaseException as error:
        traceback.print_exc()
        channel.send(("failed", MachineError(f"the engine did not start: {_one_line(error)}", fix="see the traceback")))
        return
    channel.send(("ready", facts))
    try:
        Loop(engine, channel, inbox).run()
    except BrokenPipeError:
        return


def _receive(channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
    """Reads messages from the socket at once, so that the parent never waits for a step; exits when the parent ends."""
    while True:
        try:
            inbox.put(channel.receive())
        except (EOFError, OSError):
            os._exit(0)  # the parent has ended: the current step is not needed


class Loop:
    """Adds and aborts requests, runs steps, reports. An exception in a step fails its requests, not the process."""

    def __init__(self, engine: EngineLike, channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        self._engine = engine
        self._channel = channel
        self._inbox = inbox
        self._live: set[str] = set()
        self._steps = 0
        self._failures = 0
        self._stats_at = 0.0

    def run(self) -> None:
        """Runs until the process is ended from outside. Raises the engine's exception when it fails repeatedly."""
        while True:
            self._take_messages()
            if not self._engine.has_work:
                self._send_stats()
                self._handle(self._inbox.get())
                continue
            started = time.monotonic()
            outputs = self._step()
            self._steps += 1
            self._live.difference_update(output.request_id for output in outputs if output.finish is not None)
            self._channel.send(("step", self._steps, time.monotonic() - started, pack(outputs)))
            if time.monotonic() - self._stats_at > _STATS_EVERY_S:
                self._send_stats()

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    def _handle(self, message: tuple[str, list[Any]]) -> None:
        kind, items = message
        for item in items:
            if kind == "add":
                self._add(item)
            else:
                assert kind == "abort", f"unknown message {kind!r}"
                if item in self._live:
                    self._live.discard(item)
                    self._engine.abort(item)

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except BusyError as error:
            self._channel.send(("refused", Refused(request.id, str(error), 503)))
        except HoneError as error:
            self._channel.send(("refused", Refused(request.id, str(error), 400)))
        except Exception as error:
            traceback.print_exc()
            self._channel.send(("refused", Refused(request.id, f"internal error: {_one_line(error)}", 500)))
        else:
            self._live.add(request.id)

    def _step(self) -> list[Output]:
        try:
            outputs = self._engine.step()
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
        self._channel.send(("stats", self._engine.stats()))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# ---- inside the HTTP process ---------------------------------------------------------------------------------------


class EngineProcess:
    """Handle of the worker in the HTTP process; every method is called from one event loop.

    Outputs are delivered to the `deliver` callable given with each submission, in order, on the event loop.
    """

    def __init__(self, process: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._deliver: dict[str, Callable[[Output | Refused], None]] = {}
        self._step_seconds: deque[float] = deque(maxlen=256)
        self._progress_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.facts: EngineFacts
        self.stats: dict[str, float] = {}
        self.steps = 0
        self.death: str | None = None
        self.on_death: Callable[[], None] = lambda: None

    @classmethod
    async def start(cls, build: Build, options: dict[str, Any]) -> EngineProcess:
        """Spawns the worker and waits until its engine is built. Raises the HoneError of a failed start."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=worker_main, args=(theirs, build, options), name="hone-engine", daemon=True)
        process.start()
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self = cls(process, reader, writer)
        try:
            kind, what = await self._receive()
        except (EOFError, OSError):
            raise MachineError(
                f"the engine process ended while it started: {self._exit()}", fix="see its last lines"
            ) from None
        except BaseException:  # Ctrl-C while the model loads
            process.kill()
            raise
        if kind == "failed":
            process.join(5)
            raise what
        self.facts = what
        self._task = asyncio.create_task(self._read())
        return self

    @property
    def outstanding(self) -> int:
        """Requests submitted to the engine and not finished."""
        return len(self._deliver)

    def submit(self, requests: list[Request], deliver: Callable[[Output | Refused], None]) -> None:
        """Submits `requests`; their outputs are passed to `deliver`, the last Output of each with `finish` set."""
        if self.death is not None:
            for request in requests:
                deliver(Output(request.id, finish="error", error=self.death))
            return
        if not self._deliver:
            self._progress_at = time.monotonic()  # work starts now: idle time before is no stall
        for request in requests:
            self._deliver[request.id] = deliver
        self._send(("add", requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; nothing more is delivered for them."""
        known = [request_id for request_id in request_ids if self._deliver.pop(request_id, None) is not None]
        if known and self.death is None:
            self._send(("abort", known))

    def fail_all(self, text: str) -> None:
        """Ends every outstanding request with an error and aborts it in the engine."""
        waiting = dict(self._deliver)
        self.abort(list(waiting))
        for request_id, deliver in waiting.items():
            deliver(Output(request_id, finish="error", error=text))

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
        """Ends the worker and waits for it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        await asyncio.to_thread(self._process.join, 2)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, 5)

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def _receive(self) -> Any:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise EOFError from None

    async def _read(self) -> None:
        try:
            while True:
                self._take(*await self._receive())
        except (EOFError, OSError):
            self.death = f"the engine process ended: {await asyncio.to_thread(self._exit)}"
            print(f"error: {self.death}", file=sys.stderr, flush=True)
            self.fail_all(self.death)
            self.on_death()

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "step":
            self.steps, seconds, packed = rest
            self._step_seconds.append(seconds)
            self._progress_at = time.monotonic()
            for output in unpack(packed):
                deliver = self._deliver.get(output.request_id)
                if deliver is None:
                    continue  # aborted during the step
                if output.finish is not None:
                    del self._deliver[output.request_id]
                deliver(output)
        elif kind == "stats":
            (self.stats,) = rest
        else:
            assert kind == "refused", f"unknown message {kind!r}"
            (refused,) = rest
            deliver = self._deliver.pop(refused.request_id, None)
            if deliver is not None:
                deliver(refused)

    def _exit(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            return "it closed its socket but still runs"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"
