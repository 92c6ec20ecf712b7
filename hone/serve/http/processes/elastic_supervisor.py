"""A server whose engines come and go with the load: an autoscaler decides, engines start beside the others and drain before they end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from hone.base.run import Run
from hone.serve.http.processes.board import FrontBoard
from hone.serve.http.processes.supervisor import EngineOfServer, Supervisor
from hone.serve.http.spec import ServerSpec
from hone.serve.http.worker import Build, exit_of
from hone.serve.replicas.autoscale.policy import Autoscaler, Load, Seen
from hone.serve.replicas.shares import most_replicas, share_of

_MOST_FAILURES, _WITHIN_S = 5, 60.0
_DRAINED_S = 0.1
"""Seconds between two looks at an engine that drains."""


class ElasticSupervisor(Supervisor):
    """As `Supervisor`, with engines that `spec.processes.autoscaler` starts and drains; the end of one does not end the others.

    A drained engine's process ends once no front gives it requests and all it had are done. Raises MachineError where so many
    engines have no devices.
    """

    def __init__(self, folder: Path, spec: ServerSpec, run: Run, listeners: list[Any], build: Build) -> None:
        policy = spec.processes.autoscaler
        assert isinstance(policy, Autoscaler), "the table holds nothing else"
        if "max_replicas" not in policy.model_fields_set:  # as many as have devices
            most = max(policy.min_replicas, min(policy.max_replicas, most_replicas(spec.engine, run.device)))
            policy = policy.model_copy(update={"max_replicas": most})
        share_of(spec.engine, run.device, policy.max_replicas - 1, policy.max_replicas)
        super().__init__(folder, spec, run, listeners, build)
        self._places = policy.max_replicas
        self._board = FrontBoard(len(listeners), self._places)
        self._policy, self._seen = policy, Seen(policy)
        self._next = 0.0
        self._counted = 0.0
        self._failures: deque[float] = deque(maxlen=_MOST_FAILURES)

    def _start_engines(self) -> None:
        first = max(self._policy.min_replicas, min(self._spec.processes.data_parallel_size, self._places))
        for place in range(first):
            self._spawn(place)
        self._wait_for_engines()
        self._next = time.monotonic() + self._spec.processes.scale_interval_s

    def _wakes_at(self) -> float:
        drains = any(engine.state == "draining" for engine in self._engines)
        soon = time.monotonic() + _DRAINED_S if drains else float("inf")
        return min(super()._wakes_at(), soon, float("inf") if self._stopping else self._next)

    def _look_after(self) -> None:
        if self._stopping:
            return
        for engine in self._engines:
            if (
                engine.state == "draining"
                and engine.retired_by >= set(self._fronts)
                and not self._board.outstanding(engine.place)
            ):
                self._say_to_fronts("close", engine.place)
                engine.close()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._spec.processes.scale_interval_s
            self._scale()

    def _scale(self) -> None:
        """Starts or drains engines as the policy says of the load now."""
        ready = [engine for engine in self._engines if engine.state == "ready"]
        wanted = [engine for engine in self._engines if engine.state in ("ready", "starting")]
        counted = sum(self._requests(front) for front in range(self._board.fronts))
        load = Load(time.monotonic(), len(wanted), len(ready), self._board.total(), round(counted - self._counted))
        self._counted = counted
        change = self._seen.decide(load) - len(wanted)
        free = [place for place in range(self._places) if all(engine.place != place for engine in self._engines)]
        for place in free[: max(0, change)]:
            self._run.say(f"replica {place} starts: {load.ongoing} requests in progress at {len(ready)} replicas")
            self._spawn(place)
        least = sorted(ready, key=lambda engine: (self._board.outstanding(engine.place), -engine.place))
        for engine in least[: max(0, min(-change, len(ready) - 1))]:
            self._run.say(
                f"replica {engine.place} drains: {load.ongoing} requests in progress at {len(ready)} replicas"
            )
            engine.state = "draining"
            self._say_to_fronts("retire", engine.place)

    def _requests(self, front: int) -> float:
        """Client requests that a front has taken so far."""
        counts = self._board.told(front).counted.get("hone:request_params_n", {}).get((), [0.0])
        return sum(counts[1:])

    def _say_to_fronts(self, *what: Any) -> None:
        for front in self._fronts.values():
            with contextlib.suppress(OSError):  # one that has ended is noticed by `_watch`
                front.told.send(what)

    def _hear(self, engine: EngineOfServer) -> None:
        try:
            kind, what = engine.channel.receive()
        except (EOFError, OSError):
            engine.process.join(5)
            return
        if kind == "ready":
            engine.info, engine.state = what, "ready"
            for index, front in self._fronts.items():
                engine.retired_by.discard(index)
                sock = self._door(engine)
                with contextlib.suppress(OSError):
                    front.told.send(("engine", engine.place, what))
                    send_handle(front.told, sock.fileno(), front.process.pid)
                sock.close()
        else:
            engine.lost = str(what)

    def _told_by(self, front: Any) -> None:
        try:
            what = front.told.recv()
        except (EOFError, OSError):
            front.process.join(5)
            return
        if isinstance(what, tuple):
            index = next(index for index, one in self._fronts.items() if one is front)
            for engine in self._engines:
                if engine.place == what[1] and engine.state == "draining":
                    engine.retired_by.add(index)
            return
        self._is_ready(front, what)

    def _engine_ended(self, engine: EngineOfServer) -> None:
        engine.process.join(5)
        self._engines.remove(engine)
        if engine.state == "closing":
            self._run.say(f"replica {engine.place} has ended: it was drained")
            return
        why = f"the engine process of replica {engine.place} ended: {engine.lost or exit_of(engine.process)}"
        engine.close()
        self._say_to_fronts("lost", engine.place, why)
        now = time.monotonic()
        self._failures.append(now)
        if len(self._failures) == _MOST_FAILURES and now - self._failures[0] < _WITHIN_S:
            self._death = f"{why}; {_MOST_FAILURES} ended within {_WITHIN_S:g} s"
            print(f"error: {self._death}", file=sys.stderr, flush=True)
            self._tell("drain")
            return
        print(f"warning: {why}; the others go on", file=sys.stderr, flush=True)
        self._next = min(self._next, now + 0.5)  # another may be needed
