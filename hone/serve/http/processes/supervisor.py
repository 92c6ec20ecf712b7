"""Starts the engines and the fronts of one server and watches them: fronts are replaced, the end of an engine ends all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hone.base.errors import HoneError, MachineError
from hone.base.run import Run
from hone.serve.http.processes.board import FrontBoard
from hone.serve.http.processes.front_process import FrontOrder, front_main
from hone.serve.http.processes.wire import Channel, EngineInfo
from hone.serve.http.spec import ServerSpec
from hone.serve.http.worker import AFTER_DEATH, Build, exit_of, worker_main
from hone.serve.replicas.shares import share_of

_SPAWN = multiprocessing.get_context("spawn")
_MOST_RESTARTS, _WITHIN_S = 5, 60.0
_START_S = 120.0
_END_S = 10.0


@dataclass
class EngineOfServer:
    """One engine's process. `state`: starting, ready, draining (gets no request any more) or closing."""

    place: int
    process: Any
    socket: socket.socket
    doors: socket.socket
    channel: Channel
    info: EngineInfo | None = None
    lost: str | None = None
    """Which rank ended, if the engine said so."""
    state: str = "starting"
    retired_by: set[int] = field(default_factory=set)
    """Fronts that give it no request any more."""

    def close(self) -> None:
        """Ends the process: it ends with its connection."""
        self.state = "closing"
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.doors.close()


@dataclass
class _Front:
    process: Any
    told: Connection
    ready: bool = False


class Supervisor:
    """The processes of a server with several fronts, or several engines. `listeners` has a socket for each front.

    The sockets stay open here: connections that wait at the socket of a front that ended are served by the next one.
    """

    def __init__(self, folder: Path, spec: ServerSpec, run: Run, listeners: list[socket.socket], build: Build) -> None:
        self._folder, self._spec, self._run, self._build = folder, spec, run, build
        self._listeners = listeners
        self._places = spec.processes.data_parallel_size
        """How many engines there may be."""
        self._board = FrontBoard(len(listeners), self._places)
        self._engines: list[EngineOfServer] = []
        self._fronts: dict[int, _Front] = {}
        self._ends: deque[float] = deque(maxlen=_MOST_RESTARTS)
        self._stopping = False
        self._deadline = float("inf")
        self._death: str | None = None

    def serve(self, ready: Any) -> None:
        """Starts everything, calls `ready`, and returns when a signal has ended it. Raises HoneError."""
        try:
            self._start_engines()
            for engine in self._engines[:1]:
                if engine.info is not None and engine.info.sizes:
                    self._run.say(engine.info.sizes)
            for index in range(len(self._listeners)):
                self._start_front(index, quiet=index > 0)
            with _signals() as signals:
                while not all(front.ready for front in self._fronts.values()):
                    self._watch(signals)
                    if self._stopping:
                        break
                else:
                    ready()
                while self._fronts:
                    self._watch(signals)
        finally:
            self._end()
        if self._death is not None:
            raise MachineError(self._death, fix=AFTER_DEATH)

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _spawn(self, place: int) -> None:
        """Starts the process of an engine."""
        spec = self._spec
        part, environment = share_of(spec.engine, self._run.device, place, self._places)
        options = {"folder": str(self._folder), "spec": part, "device": self._run.device, "max_queue": spec.max_queue}
        ours, theirs = socket.socketpair()
        doors, inside = socket.socketpair()
        process = _SPAWN.Process(
            target=worker_main,
            args=(theirs, self._build, options, inside, spec.max_queue),
            name=f"hone-engine-{place}",
            daemon=True,
        )
        with _environment(environment):
            process.start()
        theirs.close()
        inside.close()
        self._engines.append(EngineOfServer(place, process, ours, doors, Channel(ours)))

    def _start_engines(self) -> None:
        for place in range(self._spec.processes.data_parallel_size):
            self._spawn(place)
        self._wait_for_engines()

    def _wait_for_engines(self) -> None:
        """Until all are ready. Raises HoneError for one that does not start."""
        for engine in self._engines:
            try:
                kind, what = engine.channel.receive()
            except (EOFError, OSError):
                raise MachineError(
                    f"the engine process ended while it started: {exit_of(engine.process)}", fix="see its last lines"
                ) from None
            if kind == "failed":
                raise what
            engine.info, engine.state = what, "ready"

    def _door(self, engine: EngineOfServer) -> socket.socket:
        """A front's end of a new connection to an engine."""
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError):  # an engine that has just ended is noticed by `_watch`
            socket.send_fds(engine.doors, [b"f"], [theirs.fileno()])
        theirs.close()
        return ours

    def _start_front(self, index: int, *, quiet: bool) -> None:
        ready = [engine for engine in self._engines if engine.state == "ready" and engine.info is not None]
        inside = [self._door(engine) for engine in ready]
        info = [engine.info for engine in ready if engine.info is not None]
        for engine in self._engines:
            if engine.state != "ready":
                engine.retired_by.add(index)  # a new front does not know it
        told, parent = _SPAWN.Pipe()
        order = FrontOrder(str(self._folder), self._spec, index, info, self._board, self._run.device, quiet)
        order.places = [engine.place for engine in ready]
        process = _SPAWN.Process(
            target=front_main,
            args=(order, self._listeners[index], inside, parent),
            name=f"hone-front-{index}",
            daemon=True,
        )
        process.start()
        parent.close()
        for sock in inside:
            sock.close()
        self._fronts[index] = _Front(process, told)

    # ---- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, signals: socket.socket) -> None:
        """Waits until something happens, and does what follows from it."""
        watched: list[Any] = [signals]
        for engine in self._engines:
            if self._death is None:
                watched += [engine.process.sentinel, *([] if engine.state == "closing" else [engine.socket])]
        for front in self._fronts.values():
            watched += [front.process.sentinel, front.told]
        wakes = self._wakes_at()
        found = set(wait(watched, None if wakes == float("inf") else max(0.0, wakes - time.monotonic())))
        if signals in found:
            for number in signals.recv(64):
                self._tell("interrupt" if number == signal.SIGINT else "drain")
        if self._death is None:
            for engine in list(self._engines):
                if engine.state != "closing" and engine.socket in found:
                    self._hear(engine)
                if engine.process.sentinel in found or engine.process.exitcode is not None:
                    self._engine_ended(engine)
                    break
        for index, front in list(self._fronts.items()):
            if front.told in found:
                self._told_by(front)
            if front.process.sentinel in found:
                self._front_ended(index, front)
        self._look_after()
        if time.monotonic() > self._deadline:
            for front in self._fronts.values():
                front.process.kill()

    def _wakes_at(self) -> float:
        """When it looks around though nothing has happened (s, monotonic); infinite: never."""
        return self._deadline

    def _look_after(self) -> None:
        """What is due, whatever has happened."""

    def _tell(self, what: str) -> None:
        """Tells the fronts to "drain" or "interrupt", or why an engine ended; all of it ends them."""
        self._stopping = True
        self._deadline = min(self._deadline, time.monotonic() + self._spec.drain_s + _END_S)
        for front in self._fronts.values():
            if not front.ready:
                front.process.kill()
                continue
            with contextlib.suppress(OSError):
                front.told.send(what)

    def _hear(self, engine: EngineOfServer) -> None:
        try:
            kind, what = engine.channel.receive()
        except (EOFError, OSError):
            engine.process.join(5)
            return
        if kind == "lost":
            engine.lost = what

    def _told_by(self, front: _Front) -> None:
        try:
            what = front.told.recv()
        except (EOFError, OSError):
            front.process.join(5)
            return
        self._is_ready(front, what)

    def _is_ready(self, front: _Front, what: Any) -> None:
        if isinstance(what, HoneError):
            raise what  # it cannot start, so neither can the next
        front.ready = True

    def _engine_ended(self, engine: EngineOfServer) -> None:
        which = f" of replica {self._engines.index(engine)}" if len(self._engines) > 1 else ""
        self._death = f"the engine process{which} ended: {engine.lost or exit_of(engine.process)}"
        print(f"error: {self._death}", file=sys.stderr, flush=True)
        self._tell(self._death)

    def _front_ended(self, index: int, front: _Front) -> None:
        del self._fronts[index]
        front.told.close()
        self._board.leave(index)
        if self._stopping:
            return
        how, count = exit_of(front.process), len(self._listeners)
        now = time.monotonic()
        self._ends.append(now)
        if len(self._ends) == _MOST_RESTARTS and now - self._ends[0] < _WITHIN_S:
            self._death = f"fronts ended {_MOST_RESTARTS} times within {_WITHIN_S:g} s, the last one: {how}"
            self._tell("drain")
            return
        print(
            f"warning: front {index + 1} of {count} ended: {how}; its connections ended with it, it is started again",
            file=sys.stderr,
            flush=True,
        )
        self._start_front(index, quiet=True)

    def _end(self) -> None:
        """Ends what is left of the processes."""
        for front in self._fronts.values():
            front.process.kill()
        for engine in self._engines:
            if engine.state != "closing":
                engine.close()
        for engine in self._engines:
            engine.process.join(2)
            if engine.process.is_alive():
                engine.process.kill()
                engine.process.join(5)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket from which the numbers of SIGINT and SIGTERM can be read (in the main thread only)."""
    ours, theirs = socket.socketpair()
    if threading.current_thread() is not threading.main_thread():
        yield ours
        return
    theirs.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(theirs.fileno())
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for a process that starts meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
