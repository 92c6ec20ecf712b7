"""Rank 0's side of the other ranks: it starts them, sends them steps, and notices when one ends, fails or hangs."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hone.base.errors import HoneError
from hone.parallel.place import Place
from hone.serve.ranks.errors import RESTART, RankError
from hone.serve.ranks.frames import FrameSocket, MessageKind, unpickled


class Process(Protocol):
    """A worker's process; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


Spawn = Callable[[int, socket.socket, socket.socket, Sequence[socket.socket]], Process]
"""(rank, its socket for steps, its socket for pings, sockets that it must not keep) -> its process."""


def spawn(rank: int, steps: socket.socket, pings: socket.socket, _: Sequence[socket.socket]) -> Process:
    """Starts a worker as a process of its own, which imports nothing of this one; what it prints goes to standard error."""
    command = [sys.executable, "-m", f"{__package__}.worker", str(steps.fileno()), str(pings.fileno())]
    kept = (steps.fileno(), pings.fileno())
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), pass_fds=kept)


@dataclass
class _Worker:
    place: Place
    process: Process
    steps: FrameSocket
    pings: FrameSocket
    heard_at: float
    begun: int = 0
    ended: int = 0
    failure: str | None = None


class Links:
    """The workers of one engine, ranks 1 ... n - 1. `lost` is set once, to the error that ended them all.

    A thread pings every worker. One whose socket closes has ended; one that does not reply for `timeout_s` hangs, and so
    does a step that takes longer. Then all are killed, `on_lost` is called, and calls that wait for a rank raise `lost`.
    """

    def __init__(
        self, places: Sequence[Place], timeout_s: float, *, start: Spawn = spawn, interval_s: float = 1.0
    ) -> None:
        self.timeout_s, self._interval_s = timeout_s, interval_s
        self.lost: RankError | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.num_steps = 0
        self._waiting_since: float | None = None
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._workers: list[_Worker] = []
        ours: list[socket.socket] = []
        for place in places:
            steps, their_steps = socket.socketpair()
            pings, their_pings = socket.socketpair()
            process = start(place.rank, their_steps, their_pings, [*ours, steps, pings])
            their_steps.close()
            their_pings.close()
            ours += [steps, pings]
            self._workers.append(_Worker(place, process, FrameSocket(steps), FrameSocket(pings), time.monotonic()))
        self._thread = threading.Thread(target=self._watch, name="hone-ranks", daemon=True)
        self._thread.start()

    def send(self, kind: MessageKind, data: Any) -> None:
        """Sends a message to all workers. Raises `lost`."""
        self._raise_lost()
        if kind == MessageKind.STEP:
            self.num_steps += 1
        try:
            for worker in self._workers:
                worker.steps.send(kind, data(worker.place) if callable(data) else data)
        except OSError:
            raise self.wait_lost() from None

    def replies(self, kind: MessageKind) -> list[Any]:
        """One message of this kind from every worker. Raises the HoneError that one replies with instead, or `lost`."""
        return [self._reply(worker, kind) for worker in self._workers]

    def reply_of(self, rank: int, kind: MessageKind) -> Any:
        """The next message of this kind from one worker. Raises as `replies`."""
        return self._reply(next(one for one in self._workers if one.place.rank == rank), kind)

    def _reply(self, worker: _Worker, kind: MessageKind) -> Any:
        try:
            found, data = worker.steps.receive()
        except (EOFError, OSError):
            raise self.wait_lost() from None
        value = unpickled(data)
        if found == MessageKind.FAILED:
            if isinstance(value, HoneError):
                raise value
            worker.failure = value
            raise self.wait_lost()
        assert found == kind, f"{worker.place} replied {found.name} to {kind.name}"
        return value

    def waits(self, waiting: bool) -> None:
        """Notes that rank 0 begins or ends to wait for a step: from then on `timeout_s` counts."""
        self._waiting_since = time.monotonic() if waiting else None

    def fail(self, error: BaseException) -> RankError:
        """The error that ends the engine after `error` on rank 0: another rank's death, if that is its cause."""
        self.waits(False)
        if isinstance(error, RuntimeError):  # torch.distributed's, when a peer is gone
            with suppress(RankError):
                return self.wait_lost(3.0)
        text = " ".join(str(error).split())[:300]
        return self._lose(f"rank 0 failed: {type(error).__name__}: {text}")

    def wait_lost(self, seconds: float = 10.0) -> RankError:
        """The error that the watching thread finds. Raises RankError when it finds none: a worker closed its socket and lives."""
        self._ended.wait(seconds)
        if self.lost is None:
            raise RankError("a rank closed its socket and still runs", fix=RESTART)
        return self.lost

    def close(self, finish_s: float = 0.0) -> None:
        """Ends all workers and waits for them. Idempotent.

        For up to `finish_s` they first do what they were sent: kernels of this rank would else wait for sums that never come.
        """
        self._closing.set()
        for worker in self._workers:
            with suppress(OSError):
                worker.steps.socket.shutdown(socket.SHUT_WR)
        self._wait_ended(finish_s)
        for worker in self._workers:
            with suppress(OSError):
                worker.pings.socket.shutdown(socket.SHUT_RDWR)
        self._wait_ended(5.0)
        self._kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        for worker in self._workers:
            worker.steps.close()
            worker.pings.close()

    def _wait_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            while worker.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)

    def _raise_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                with suppress(OSError):
                    worker.process.kill()
        for worker in self._workers:  # no zombies
            for _ in range(500):
                if worker.process.poll() is not None:
                    break
                time.sleep(0.01)

    def _watch(self) -> None:
        pinged = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if now - pinged >= self._interval_s:
                pinged = now
                for worker in self._workers:
                    with suppress(OSError):
                        worker.pings.socket.send(b"?", socket.MSG_DONTWAIT)
            try:
                ready, _, _ = select.select([one.pings.socket for one in self._workers], [], [], self._interval_s)
            except (OSError, ValueError):
                return  # closed meanwhile
            trouble = self._heard([one for one in self._workers if one.pings.socket in ready]) or self._hanging()
            if self._closing.is_set():
                return
            if trouble:
                self._lose(trouble)
                return

    def _heard(self, workers: Sequence[_Worker]) -> str | None:
        """Reads replies; what is wrong with a worker that has none any more."""
        for worker in workers:
            try:
                kind, data = worker.pings.receive()
            except (EOFError, OSError):
                return f"{worker.place} {self._exit(worker)}"
            if kind == MessageKind.FAILED:
                worker.failure = unpickled(data)
            else:
                worker.heard_at = time.monotonic()
                worker.begun, worker.ended = unpickled(data)
        return None

    def _hanging(self) -> str | None:
        now, since, most = time.monotonic(), self._waiting_since, self.timeout_s
        waited = 0.0 if since is None else now - since
        overdue = waited > self.timeout_s
        if overdue:  # a stopped rank holds up a step from the same moment on, and which time is over first is chance
            most = min(most, max(most / 2, 3 * self._interval_s))
        for worker in self._workers:
            if now - worker.heard_at > most:
                return f"{worker.place} does not answer for {now - worker.heard_at:.0f} s: it is stopped or hangs"
        if not overdue:
            return None
        behind = min(self._workers, key=lambda one: (one.begun, one.ended))
        each = ", ".join(f"rank {one.place.rank}: {one.begun} begun, {one.ended} launched" for one in self._workers)
        return (
            f"a step has not ended for {waited:.0f} s: {behind.place} is furthest behind "
            f"(steps sent: {self.num_steps}; {each})"
        )

    def _exit(self, worker: _Worker) -> str:
        deadline = time.monotonic() + 2
        while (code := worker.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if worker.failure:
            return f"failed: {worker.failure}"
        if code is None:
            return f"closed its socket and still runs (process {worker.process.pid})"
        return f"ended: killed by {signal.Signals(-code).name}" if code < 0 else f"ended: exit code {code}"

    def _lose(self, what: str) -> RankError:
        if self.lost is None:
            self.lost = RankError(what, fix=RESTART)
            self._kill()
            self._ended.set()
            self.on_lost()
        return self.lost


def end_process(links: Links, say: Callable[[RankError], None], grace_s: float = 5.0) -> None:
    """For a process that does nothing but serve: some seconds after a rank is lost it calls `say` and ends.

    A kernel that waits for a lost rank cannot be interrupted, so that the main thread may never come back to raise `lost`.
    """
    before = links.on_lost

    def end() -> None:
        before()
        time.sleep(grace_s)
        assert links.lost is not None, "called when a rank is lost"
        say(links.lost)
        os._exit(3)

    links.on_lost = lambda: threading.Thread(target=end, daemon=True).start()
