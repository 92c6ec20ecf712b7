"""How long a step takes in a simulation: predicted by the cost model, or fixed for the truths of queueing theory."""

from __future__ import annotations

import math
from typing import Protocol

from hone.cost.serve.schedule import StepKind
from hone.cost.serve.serving import Serving
from hone.serve.sequence import ScheduledSeq


class StepTimes(Protocol):
    """Says how long a step takes."""

    def step_s(self, kind: StepKind, *, again: bool = False) -> float:
        """Seconds from one step's start on the device to its end.

        `again`: the replica has run a step with prompts of as many tokens (padded), so that a GPU replays its graph.
        """


class PredictedSteps:
    """The seconds that `serving` predicts, times `factor`, and `host_s` more for each step.

    Decode steps are predicted at contexts that are a factor of 1.19 apart and interpolated in between: their time is linear in
    the context but for windows, so that steps need not each be priced anew.
    """

    def __init__(self, serving: Serving, *, host_s: float = 0.0, factor: float = 1.0) -> None:
        self.serving = serving
        self.bound = False
        """Whether any step's time was a limit of the hardware and not a prediction."""
        self._host_s, self._factor = host_s, factor
        self._known: dict[tuple[int, int], float] = {}

    def step_s(self, kind: StepKind, *, again: bool = False) -> float:
        if kind.chunks:
            return self._priced(kind, again=again)
        place = 4 * math.log2(max(kind.context, 1.0))
        low = int(place)
        below, above = 2 ** (low / 4), 2 ** ((low + 1) / 4)
        share = (max(kind.context, 1.0) - below) / (above - below)
        return (1 - share) * self._at(kind.decoding, low) + share * self._at(kind.decoding, low + 1)

    def _at(self, decoding: int, place: int) -> float:
        known = self._known.get((decoding, place))
        if known is None:
            known = self._priced(StepKind(decoding, 2 ** (place / 4), (), decoding, 1))
            self._known[decoding, place] = known
        return known

    def _priced(self, kind: StepKind, *, again: bool = False) -> float:
        found = self.serving.step_seconds(kind, again=again)
        self.bound = self.bound or found.bound
        return found.value * self._factor + self._host_s


def kind_of(scheduled: list[ScheduledSeq]) -> StepKind:
    """What the scheduler decided, in the terms of the cost model: sequences that decode, and prompts' chunks."""
    decoding, context, samples, chunks = 0, 0, 0, []
    for item in scheduled:
        samples += item.samples
        if item.count == 1 and item.samples and item.start:
            decoding += 1
            context += item.start + 1
        else:
            chunks.append((item.start, item.count))
    return StepKind(decoding, context / decoding if decoding else 0.0, tuple(chunks), samples, 1)
