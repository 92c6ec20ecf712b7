"""Plays a schedule with given seconds: when each pass runs, how long ranks wait, what they hold at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.cost.pipeline.table import Kind, Op, Table


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass of one microbatch: one number for all stages or one a stage; `transfer` between two ranks.

    B takes `inputs` and `weights` together. A transfer goes on beside the passes of both ranks. DualPipe's paired passes are
    one after the other, as the executor runs them.
    """

    forward: float | Sequence[float] = 1.0
    inputs: float | Sequence[float] = 1.0
    weights: float | Sequence[float] = 1.0
    transfer: float = 0.0
    step: float = 0.0

    def of(self, op: Op) -> float:
        """Seconds of `op`."""
        if op.kind == "S":
            return self.step
        parts = {"F": [self.forward], "B": [self.inputs, self.weights], "I": [self.inputs], "W": [self.weights]}
        return sum(part if isinstance(part, int | float) else part[op.stage] for part in parts[op.kind])


class Span(NamedTuple):
    """A pass in time."""

    op: Op
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """What `simulate` found. `spans[r]` are the passes of rank r in time, `peaks[r]` its most activations at once.

    An activation counts 1 in every stage, from the begin of F to the end of B or W.
    """

    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the last."""
        return max(spans[-1].end for spans in self.spans if spans)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time until the last pass has ended in which they wait."""
        busy = sum(span.end - span.begin for spans in self.spans for span in spans)
        return 1 - busy / (self.seconds * len(self.spans))

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits between its own first and last pass: the next step may begin there.

        This is what the papers of ZB-H2 and ZB-V call the bubble; it takes the optimizer's post-validation, because
        the ranks then do not meet before the step.
        """
        return tuple(
            spans[-1].end - spans[0].begin - sum(span.end - span.begin for span in spans) for spans in self.spans
        )


def simulate(table: Table, costs: Costs | None = None) -> Played:
    """Runs the table in simulated time.

    A pass begins when its rank is free and its inputs have arrived. Raises SpecError when ranks wait for each other.
    """
    costs, sizes = costs or Costs(), [1.0] * table.stages
    ended: list[float] = []
    spans: list[list[Span]] = [[] for _ in table.ranks]
    for rank, op, before, sent in table.turns:
        begin = max([ended[before] if before >= 0 else 0.0, *(ended[one] + costs.transfer for one in sent)])
        ended.append(begin + costs.of(op))
        spans[rank].append(Span(op, begin, ended[-1]))
    return Played(tuple(map(tuple, spans)), tuple(peak(table, rank, sizes) for rank in range(len(table.ranks))))


def seconds_of_many(
    table: Table, costs: Mapping[Kind, NDArray[np.float64]], transfer: float = 0.0
) -> NDArray[np.float64]:
    """`simulate(...).seconds` of many costs at once, to the bit: float64 [N] for `costs` of F, I and W, float64 [stages, N] each.

    Of a synchronous schedule, which has no S.
    """
    each = {**costs, "B": costs["I"] + costs["W"]}
    ended: list[NDArray[np.float64]] = []
    for _, op, before, sent in table.turns:
        begin = ended[before] if before >= 0 else np.zeros(costs["F"].shape[1])
        for one in sent:
            begin = np.maximum(begin, ended[one] + transfer)
        ended.append(begin + each[op.kind][op.stage])
    last = {rank: number for number, (rank, *_) in enumerate(table.turns)}
    return np.max([ended[number] for number in last.values()], axis=0)


def peak(table: Table, rank: int, sizes: Sequence[float]) -> float:
    """The most activations that `rank` holds at once: the order of its passes decides, not their time.

    `sizes`: the activation of one microbatch per stage.
    """
    return max(peaks(table, rank, sizes))


def peaks(table: Table, rank: int, sizes: Sequence[float]) -> tuple[float, float]:
    """As `peak`, until the rank's first backward pass has ended, before which it has no gradients of weights, and from then on."""
    live, most = 0.0, [0.0, 0.0]
    has_gradients = False
    for op in table.ranks[rank]:
        if op.kind == "F":
            live += sizes[op.stage]
        elif op.kind in "BW":
            live -= sizes[op.stage]
            has_gradients = True
        most[has_gradients] = max(most[has_gradients], live)
    return most[0], most[1]
