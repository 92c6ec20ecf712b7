"""Steps whose time does not depend on what is in them."""

from __future__ import annotations

from collections.abc import Callable

from hone.cost.serve.schedule import StepKind


class FixedSteps:
    """Every step takes what `draw` says, whatever is in it: one server of queueing theory."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw

    def step_s(self, kind: StepKind, *, again: bool = False) -> float:
        return self._draw()
