"""An engine whose steps a clock policy is told of."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from hone.measure.clocks.governed import governed
from hone.measure.clocks.policies.base import Governor


class Clocked:
    """`engine`, with every step's output tokens and phase told to `governor`: a step that reads prompts is of prefill."""

    def __init__(self, engine: Any, governor: Governor) -> None:
        self._engine, self._governor = engine, governor
        self._prompt = self._output = 0.0
        self.held: ExitStack | None = None
        """What gives the GPU back, where it is held for the engine alone."""

    def step(self) -> Any:
        """As the engine's."""
        outputs = self._engine.step()
        stats = self._engine.stats()
        read, made = stats["prompt_tokens"] - self._prompt, stats["output_tokens"] - self._output
        self._prompt, self._output = stats["prompt_tokens"], stats["output_tokens"]
        if read or made:
            self._governor.worked(made, "prefill" if read else "decode")
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def clocked(engine: Any, clock: dict[str, Any] | None, device: str) -> Any:
    """`engine` under the policy `clock` until this process ends, which restores what is set (`restore_all` before `os._exit`)."""
    if clock is None:
        return engine
    stack = ExitStack()
    governor = stack.enter_context(governed(clock, device, lambda line: print(line, file=sys.stderr, flush=True)))
    if governor is None:
        return engine
    made = Clocked(engine, governor)
    made.held = stack
    return made
