"""An engine without a model that counts upwards and fails on command; prompts' first token says how."""

from __future__ import annotations

import os
import signal
import time

from hone.base.errors import SpecError
from hone.serve.http.worker import EngineInfo
from hone.serve.request import BusyError, Output, Request

VOCAB = 256
ADD_RAISES, ADD_REFUSES, STEP_RAISES, FAILS_ALONE, KILLED, STUCK, ALWAYS_RAISES, ADD_IS_BUSY = range(1, 9)
STUCK_S = 2.5
STEP_S = 0.002


class FakeEngine:
    """Every step gives each request the token after its last one; `STEP_S` a step."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, Request] = {}
        self._made: dict[str, list[int]] = {}
        self._aborted = 0
        self._raised: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        if request.prompt[0] == ADD_RAISES:
            raise RuntimeError("add is broken")
        if request.prompt[0] == ADD_REFUSES:
            raise SpecError("not this one", fix="send another")
        if request.prompt[0] == ADD_IS_BUSY:
            raise BusyError("many wait already", fix="try again in a moment")
        self._requests[request.id] = request
        self._made[request.id] = []

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None):
            self._aborted += 1

    def step(self) -> list[Output]:
        time.sleep(STEP_S)
        return [self._advance(request) for request in list(self._requests.values())[: self._max_num_seqs]]

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
                del self._requests[request.id]
                return Output(request.id, finish="error", error="this request is broken")
        made.append((request.prompt[-1] + len(made) + 1) % VOCAB)
        finish = "length" if len(made) >= request.params.max_tokens else None
        if finish:
            del self._requests[request.id]
        return Output(
            request.id,
            tokens=made[-1:],
            finish=finish,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(made),
        )

    def idle(self) -> bool:
        return False

    def when_lost(self, say) -> None:
        """It has one process."""

    def stats(self) -> dict[str, float]:
        return {"running": len(self._requests), "aborted": self._aborted}


def build(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """What `serve(..., build=build)` starts in the worker."""
    return FakeEngine(), EngineInfo(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=4)


def build_broken(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """A worker whose engine cannot be built."""
    raise RuntimeError("no engine today")


class FastEngine(FakeEngine):
    """Takes no time, so that what is measured is the server."""

    def step(self) -> list[Output]:
        return [self._advance(request) for request in list(self._requests.values())]


def build_fast(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """For measuring what HTTP costs."""
    return FastEngine(), EngineInfo(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=64)


def build_wide(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """A context of any length, so that texts of megabytes are legal."""
    return FakeEngine(), EngineInfo(max_model_len=2**30, vocab_size=100_000, max_num_seqs=4)


def build_one(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """One sequence at a time: the second request waits."""
    return FakeEngine(1), EngineInfo(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=1)


class SteadyEngine(FakeEngine):
    """A step of a given time for any number of sequences, without a busy processor, as a GPU's; with text."""

    def __init__(self) -> None:
        super().__init__(4096)
        self._step_s = float(os.environ.get("HONE_FAKE_STEP_MS", "18")) / 1000
        self._due = 0.0

    def step(self) -> list[Output]:
        now = time.perf_counter()
        self._due = max(self._due + self._step_s, now)  # as ahead as a GPU: what the loop costs hides behind the step
        time.sleep(self._due - now)
        outputs = [self._advance(request) for request in list(self._requests.values())]
        for output in outputs:
            output.text = " word"
        return outputs


def build_steady(**options: object) -> tuple[FakeEngine, EngineInfo]:
    """For measuring the front at the pace of a GPU."""
    return SteadyEngine(), EngineInfo(max_model_len=100_000, vocab_size=VOCAB, max_num_seqs=4096)
