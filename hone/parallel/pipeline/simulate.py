"""Plays a schedule with given seconds: when each pass runs, how long ranks wait, what they hold at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hone.base.errors import SpecError
from hone.parallel.pipeline.table import Op, Result, Table, deps, results


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass of one microbatch: one number for all stages or one a stage; `transfer` between two ranks.

    B takes `inputs` and `weights` together. A transfer goes on beside the passes of both ranks. None for `pair`: paired
    passes are one after the other, as the executor runs them, and so all estimates. A number is for what is published of
    DualPipe: they begin together, when both have their input, and take so much of the seconds of one after the other.
    """

    forward: float | Sequence[float] = 1.0
    inputs: float | Sequence[float] = 1.0
    weights: float | Sequence[float] = 1.0
    transfer: float = 0.0
    step: float = 0.0
    pair: float | None = None

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
    ended: dict[Result, float] = {}
    places: dict[Result, int] = {}
    spans: list[list[Span]] = [[] for _ in table.ranks]
    left, moved = sum(map(len, table.ranks)), True
    while left:
        if not moved:
            waiting = [
                f"rank {rank} at {ops[len(spans[rank])]}"
                for rank, ops in enumerate(table.ranks)
                if len(ops) > len(spans[rank])
            ]
            raise SpecError(
                f"schedule {table.name} stops: {'; '.join(waiting)}",
                fix="order the passes so that each one's input is made before, see deps in hone/parallel/pipeline/table.py",
            )
        moved = False
        for rank, ops in enumerate(table.ranks):
            while len(spans[rank]) < len(ops):
                at = len(spans[rank])
                together = ops[at : at + 2] if ops[at].paired and costs.pair is not None else ops[at : at + 1]
                needed = [one for op in together for one in deps(table, op)]
                if any(one not in ended for one in needed):
                    break
                arrived = [ended[one] + (costs.transfer if places[one] != rank else 0.0) for one in needed]
                end = max([spans[rank][-1].end if spans[rank] else 0.0, *arrived])
                for op in together:
                    begin, end = (
                        end,
                        end + costs.of(op) * (1.0 if len(together) == 1 or costs.pair is None else costs.pair),
                    )
                    spans[rank].append(Span(op, begin, end))
                for one in (one for op in together for one in results(op)):
                    ended[one], places[one] = end, rank
                left, moved = left - len(together), True
    return Played(tuple(map(tuple, spans)), tuple(peak(table, rank, sizes) for rank in range(len(table.ranks))))


def peak(table: Table, rank: int, sizes: Sequence[float]) -> float:
    """The most activations that `rank` holds at once: the order of its passes decides, not their time.

    `sizes`: the activation of one microbatch per stage.
    """
    live = most = 0.0
    for op in table.ranks[rank]:
        if op.kind == "F":
            live += sizes[op.stage]
            most = max(most, live)
        elif op.kind in "BW":
            live -= sizes[op.stage]
    return most
