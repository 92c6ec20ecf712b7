"""Executes the best ways, corrects the predictions of their kinds by what they took, once, and ranks again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from hone.base.errors import MachineError
from hone.base.run import Run
from hone.plan.search.executing import serving, training
from hone.plan.search.front import front
from hone.plan.search.goal import HERE, Goal
from hone.plan.search.searching import Found, explained, in_order
from hone.plan.search.ways import Way, table_of

STEPS, BUDGET_S = 6, 20.0
"""Steps of an executed training after the warm ones, and the seconds after which no further one is begun."""


class Pair(NamedTuple):
    """A prediction beside its measurement."""

    kind: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.measured / self.predicted


def kinds_of(way: Way) -> tuple[str, ...]:
    """What the seconds of a way's stage have in common with those of others, the narrowest first: the format, then the stage."""
    if way.engine is not None:
        return (f"serve {way.format.name if way.format else ''}", "serve")
    assert way.train is not None, "a way trains or serves"
    return f"train {way.train['precision']} {way.train['recomputation']}", f"train {way.train['precision']}", "train"


def factors(pairs: Mapping[int, Pair], ways: list[Way]) -> dict[str, float]:
    """For each kind the median of measured over predicted seconds of the ways that were executed (`pairs` by place in `ways`)."""
    found: dict[str, list[float]] = {}
    for place, pair in pairs.items():
        for kind in kinds_of(ways[place]):
            found.setdefault(kind, []).append(pair.ratio)
    return {kind: statistics.median(ratios) for kind, ratios in found.items()}


def corrected(way: Way, by: Mapping[str, float]) -> Way:
    """`way` with its seconds times the factor of its narrowest kind that has one; as it is where none has."""
    factor = next((by[kind] for kind in kinds_of(way) if kind in by), 1.0)
    return scaled(way, factor)


def scaled(way: Way, factor: float) -> Way:
    """`way` whose last stage takes `factor` times as long."""
    if way.engine is not None:
        assert way.tpot_s is not None and way.ttft_s is not None and way.tokens_per_s is not None, (
            "a way that serves has all three"
        )
        more = {"tpot_s": way.tpot_s * factor, "ttft_s": way.ttft_s * factor, "tokens_per_s": way.tokens_per_s / factor}
        return replace(way, serve_hours=way.serve_hours * factor, **more)
    assert way.step_s is not None, "a training has steps"
    return replace(way, step_s=way.step_s * factor, train_hours=way.train_hours * factor)


def seconds_of(way: Way) -> float:
    """What is predicted of a way and measured: seconds of a step, or of an output token of all sequences together."""
    if way.engine is not None:
        return 1 / (way.tokens_per_s or float("nan"))
    return way.step_s or float("nan")


def measure(way: Way, goal: Goal, device: str) -> float:
    """`seconds_of` as it is on this machine. Raises MachineError for a way of several devices or of another machine."""
    if way.fleet.count > 1:
        raise MachineError(
            f"{way.label()} is for {way.fleet.label}, this process has one device",
            fix="execute its recipe there, or search with machines: [here]",
        )
    if way.engine is not None:
        assert way.format is not None, "a way that serves has a format"
        return 1 / serving.run(way.candidate, way.format, way.engine, goal.requests, device=device).tokens_per_s
    assert way.train is not None, "a way trains or serves"
    sizes = {"seq_len": goal.seq_len, "device": device, "steps": STEPS, "budget_s": BUDGET_S}
    return training.step_seconds(way.candidate, way.train, **sizes).seconds


def executed(found: Found, count: int, run: Run, ask: Callable[[Way, Goal, str], float] = measure) -> Found:
    """`found` after its best `count` ways of this machine were run: the executed ones with what they took, all others corrected by the
    factors of their kinds, ranked again. `ask` measures a way.

    Raises MachineError where no way is of this machine.
    """
    ways = list(found.ways)
    # Of a format whose bits real weights decide there is nothing to draw.
    drawn = [not (way.format and way.format.allocation) for way in ways]
    mine = [place for place, way in enumerate(ways) if way.fleet.name == HERE and drawn[place]][:count]
    if ways and not mine:
        raise MachineError(
            "no way of the front is for this machine, so none can be executed here",
            fix="add here to machines, or leave --execute out",
        )
    pairs: dict[int, Pair] = {}
    for place in mine:
        way = ways[place]
        took = ask(way, found.goal, run.device)
        pairs[place] = Pair(kinds_of(way)[0], seconds_of(way), took)
        run.say(f"executed {way.label()}: {took:.4g} s, predicted {seconds_of(way):.4g} s")
    by = factors(pairs, ways)
    again = []
    for place, way in enumerate(ways):
        if place in pairs:
            pair = pairs[place]
            told = {"predicted_s": pair.predicted, "measured_s": pair.measured}
            again.append(replace(scaled(way, pair.ratio), evidence="executed", measured=told))
        elif way.fleet.name == HERE:
            again.append(corrected(way, by))
        else:
            again.append(way)
    values, halves, groups = table_of(again)
    keep = front(values, halves, groups)
    ordered = in_order([way for way, on in zip(again, keep, strict=True) if on], found.goal)
    notes = tuple(f"corrected: {kind} takes {factor:.3f} times its prediction" for kind, factor in by.items())
    return replace(found, ways=explained(ordered), notes=(*found.notes, *notes))
