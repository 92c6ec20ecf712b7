"""An engine without a model that counts upwards and fails on command; prompts' first token says how."""

from __future__ import annotations

import os
import signal
import time

from hone.base.errors import SpecError
from hone.serve.http.worker import EngineFacts
from hone.serve.request import BusyError, Output, Request

VOCAB = 256
ADD_RAISES, ADD_REFUSES, STEP_RAISES, FAILS_ALONE, KILLED, STUCK, ALWAYS_RAISES, ADD_IS_BUSY = range(1, 9)
STUCK_S = 2.5
STEP_S = 0.002


class FakeEngine:
    """Every step gives each request the token after its last one; `STEP_S` a step."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self._max_rows = max_num_seqs
        self._rows: dict[str, Request] = {}
        self._made: dict[str, list[int]] = {}
        self._aborted = 0
        self._raised: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: Request) -> None:
        if request.prompt[0] == ADD_RAISES:
            raise RuntimeError("add is broken")
        if request.prompt[0] == ADD_REFUSES:
            raise SpecError("not this one", fix="send another")
        if request.prompt[0] == ADD_IS_BUSY:
            raise BusyError("many wait already", fix="try again in a moment")
        self._rows[request.id] = request
        self._made[request.id] = []

    def abort(self, request_id: str) -> None:
        if self._rows.pop(request_id, None):
            self._aborted += 1

    def step(self) -> list[Output]:
        time.sleep(STEP_S)
        return [self._advance(request) for request in list(self._rows.values())[: self._max_rows]]

    def _advance(self, request: Request) -> Output:
        kind, made = request.prompt[0], self._made[request.id]
        if kind == ALWAYS_RAISES:
            raise RuntimeError("step is broken")
        if len(made) == 2:  # not at once, so that a stream has begun
            if kind == STEP_RAISES and request.id not in self._raised:
                self._raised.add(request.id)
                raise RuntimeError("step is broken")
            if kind == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == STUCK:
                time.sleep(STUCK_S)
            if kind == FAILS_ALONE:
                del self._rows[request.id]
                return Output(request.id, finish="error", error="this row is broken")
        made.append((request.prompt[-1] + len(made) + 1) % VOCAB)
        finish = "length" if len(made) >= request.params.max_tokens else None
        if finish:
            del self._rows[request.id]
        return Output(request.id, tokens=made[-1:], finish=finish, num_prompt_tokens=len(request.prompt))

    def stats(self) -> dict[str, float]:
        return {"running": len(self._rows), "aborted": self._aborted}


def build(**options: object) -> tuple[FakeEngine, EngineFacts]:
    """What `serve(..., build=build)` starts in the worker."""
    return FakeEngine(), EngineFacts(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=4)


def build_broken(**options: object) -> tuple[FakeEngine, EngineFacts]:
    """A worker whose engine cannot be built."""
    raise RuntimeError("no engine today")


class FastEngine(FakeEngine):
    """Takes no time, so that what is measured is the server."""

    def step(self) -> list[Output]:
        return [self._advance(request) for request in list(self._rows.values())]


def build_fast(**options: object) -> tuple[FakeEngine, EngineFacts]:
    """For measuring what HTTP costs."""
    return FastEngine(), EngineFacts(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=64)
