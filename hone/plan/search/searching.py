"""The search: all configurations priced, the front with its error bars, the best simulated, and what stands in the way if nothing is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hone.base.errors import SpecError
from hone.measure.machine import Machine
from hone.plan.search.exact import Refused, simulated
from hone.plan.search.front import chosen, front
from hone.plan.search.goal import AXES, HERE, Goal
from hone.plan.search.limits import Limit, Tally
from hone.plan.search.machines import Fleet, fleet_of
from hone.plan.search.quality import Known, measured_losses
from hone.plan.search.relax import Relaxed
from hone.plan.search.serving.mixed import mixed_formats
from hone.plan.search.serving.space import Servings
from hone.plan.search.serving.space import best as best_servings
from hone.plan.search.shapes import candidates_of
from hone.plan.search.training.best import best as best_trainings
from hone.plan.search.training.layers import refined
from hone.plan.search.training.space import Trainings
from hone.plan.search.ways import Way, table_of

SIMULATED = 10
"""Ways that are planned exactly."""

REFINED = 4
"""Of them, those whose recomputed layers are chosen one by one: a plan or two more of each."""

SIMULATE_S = 60.0
"""Seconds after which no further one is begun: a pipeline of 64 stages takes some seconds each."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    goal: Goal
    ways: tuple[Way, ...]
    """The front with all that overlaps it and was simulated, the chosen one first."""
    tally: Tally
    fleets: tuple[Fleet, ...]
    search_s: float
    """Seconds in which all configurations were priced."""
    simulate_s: float = 0.0
    relaxed: tuple[Relaxed, ...] = ()
    """Where no way keeps all limits: for each limit what it would have to be, verified by another search."""
    overlapping: int = 0
    """Further ways within the error bars of the front, which were not simulated."""
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> Way | None:
        """The way that is recommended."""
        return self.ways[0] if self.ways else None


def limits_of(goal: Goal) -> tuple[Limit, ...]:
    """The limits of a goal; that of memory is a fraction of each device's own."""
    found = [Limit("memory", 1.0, "of a device's memory")]
    if goal.deadline_h is not None:
        found.append(Limit("deadline", goal.deadline_h, "h"))
    if goal.budget is not None:
        found.append(Limit("budget", goal.budget, "$"))
    if goal.energy_kwh is not None:
        found.append(Limit("energy", goal.energy_kwh, "kWh"))
    if goal.quality.loss is not None:
        found.append(Limit("loss", goal.quality.loss, "nats a token"))
    asked = goal.requests
    if goal.serves:
        found += [Limit("ttft", asked.ttft_s, "s")] if asked.ttft_s is not None else []
        found += [Limit("tpot", asked.tpot_s, "s")] if asked.tpot_s is not None else []
        found += [Limit("throughput", asked.tokens_per_s, "tokens/s", True)] if asked.tokens_per_s is not None else []
    if goal.quality.max_increase is not None:
        found.append(Limit("loss of compression", goal.quality.max_increase, "nats a token"))
    return tuple(found)


def fleets_of(goal: Goal, device: str = "cpu", machine: Machine | None = None) -> tuple[Fleet, ...]:
    """The machines of a goal. Raises SpecError where a limit is of something that is unknown of all of them."""
    fleets = tuple(fleet_of(one, goal, device, machine) for one in goal.machines)
    if goal.budget is not None and all(one.price_per_hour is None for one in fleets):
        raise SpecError(
            f"budget is ${goal.budget:g}, and no price of {', '.join(goal.machines)} is known",
            fix="give price_per_hour: 2.50, or {H100: 2.50} by machine",
        )
    if goal.energy_kwh is not None and all(one.watts is None for one in fleets):
        raise SpecError(
            f"energy_kwh is {goal.energy_kwh:g}, and no power of {', '.join(goal.machines)} is known",
            fix="leave it out, or calibrate a machine that has a sensor (hone calibrate) and search there",
        )
    return fleets


def priced(goal: Goal, fleets: tuple[Fleet, ...]) -> tuple[list[Way], Tally]:
    """Every configuration priced: those that keep the limits and may be on the front, and the count of all others."""
    tally, ways = Tally(limits_of(goal)), list[Way]()
    candidates = candidates_of(goal)
    losses = measured_losses(goal.measured) if goal.measured else {}
    mixed = mixed_formats(goal)
    for fleet in fleets:
        for candidate in candidates:
            trains = best_trainings(Trainings(goal, candidate, fleet), tally) if goal.trains else []
            if not goal.serves:
                ways += trains
                continue
            if goal.trains and not trains:
                continue
            serves = best_servings(Servings(goal, candidate, fleet, losses, mixed), tally)
            ways += chained(trains, serves, tally) if goal.trains else serves
    return ways, tally


OF_A_CHAIN = 4
"""Trainings of each batch size and number of tokens that are joined with every way to serve: they share no resource but the limits of
the whole, so that the front of a chain is made of the fronts of its parts."""


def chained(trains: list[Way], serves: list[Way], tally: Tally) -> list[Way]:
    """Each of the best trainings with each way to serve its model, where the whole keeps the limits."""
    seen: Counter[str] = Counter()
    few = [
        one
        for one in sorted(trains, key=lambda way: way.train_hours)
        if (seen.update([one.group]) or seen[one.group]) <= OF_A_CHAIN
    ]
    pairs = [joined(one, other) for one in few for other in serves]
    if not pairs:
        return []
    tally.asked += len(pairs)
    unknown = float("nan")

    def column(ask: Callable[[Way], float | None]) -> np.ndarray:
        return np.array([unknown if (value := ask(way)) is None else value for way in pairs])

    values = {
        "deadline": column(lambda way: way.making_hours),
        "budget": column(lambda way: way.axes()["dollars"]),
        "energy": column(lambda way: way.axes()["joules"]) / 3.6e6,
    }
    good = tally.keep(values, lambda index: pairs[index])
    return [way for way, fine in zip(pairs, good, strict=True) if fine]


def joined(train: Way, serve: Way) -> Way:
    """The chain of a training and of serving its model; its loss is the training's and what the compression adds, if both are known."""
    quality = None
    if train.quality is not None and serve.quality is not None:
        one, other = train.quality, serve.quality
        quality = Known(one.value + other.value, one.half + other.half, f"{one.how}; {other.how}")
    return replace(
        serve,
        train=train.train,
        step_s=train.step_s,
        train_hours=train.train_hours,
        train_bytes=train.train_bytes,
        quality=quality,
    )


def search(
    goal: Goal,
    *,
    device: str = "cpu",
    machine: Machine | None = None,
    most: int = SIMULATED,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """The front of `goal`; `machine` describes this one (None: it is asked), `most` ways are simulated.

    Raises SpecError for a goal that no search can answer.
    """
    begun = time.perf_counter()
    fleets = fleets_of(goal, device, machine)
    ways, tally = priced(goal, fleets)
    took = time.perf_counter() - begun
    say(f"{tally.asked:,} configurations in {took:.1f} s, {len(ways)} of the best kept")
    if not ways:
        from hone.plan.search.relax import relaxations

        found = relaxations(goal, tally, lambda other: priced(other, fleets_of(other, device, machine))[0])
        return Found(goal, (), tally, fleets, took, relaxed=found)
    values, halves, groups = table_of(ways)
    on = np.flatnonzero(front(values, halves, groups))
    kept = mixed(in_order([ways[place] for place in on], goal))
    begun = time.perf_counter()
    exact = _simulated(kept, goal, most, tally, say)
    simulate_s = time.perf_counter() - begun
    if not exact:
        return Found(
            goal,
            (),
            tally,
            fleets,
            took,
            simulate_s,
            notes=("every way of the front was refused when it was simulated",),
        )
    values, halves, groups = table_of(exact)
    final = in_order([exact[place] for place in np.flatnonzero(front(values, halves, groups))], goal)
    return Found(goal, explained(final), tally, fleets, took, simulate_s, overlapping=max(len(kept) - most, 0))


def in_order(ways: list[Way], goal: Goal) -> list[Way]:
    """`ways` by the weights of `goal`, the chosen one first."""
    left, found = list(ways), list[Way]()
    weights = [goal.weights.get(axis, 0.0) for axis in AXES]
    while left:
        place = chosen(table_of(left)[0], weights)
        if place is None:
            return found + left
        found.append(left.pop(place))
    return found


OF_THE_BEST = 4
"""Ways of the first group that are simulated before one of each other group."""


def mixed(ways: list[Way]) -> list[Way]:
    """`ways` in an order to simulate: the first of the best group (model, tokens, machine), one of each other group, then the rest."""
    first = f"{ways[0].fleet.label} {ways[0].group}" if ways else ""
    rank: dict[int, tuple[int, int]] = {}
    seen: dict[str, int] = {}
    for place, way in enumerate(ways):
        group = f"{way.fleet.label} {way.group}"
        number = seen[group] = seen.get(group, 0) + 1
        most = OF_THE_BEST if group == first else 1
        rank[place] = (0 if group == first and number <= most else 1 if number <= most else 2, place)
    return [ways[place] for place in sorted(rank, key=lambda one: rank[one])]


def _simulated(kept: list[Way], goal: Goal, most: int, tally: Tally, say: Callable[[str], None]) -> list[Way]:
    """The first `most` ways that their stages plan, within `SIMULATE_S` for all but the first; those whose layers, once chosen, make them
    another one are left out."""
    begun, found, known = time.perf_counter(), list[Way](), set[tuple[str, str, str]]()
    for way in kept:
        if len(found) >= most or (found and time.perf_counter() - begun > SIMULATE_S):
            break
        try:
            found.append(simulated(way, goal))
        except Refused as refused:
            tally.rejected[f"when simulated: {refused.what}"[:120]] += 1
            continue
        if len(found) <= REFINED and "layers" in goal.space.recomputation:
            found[-1] = refined(found[-1], goal, simulated)
        name = (found[-1].fleet.label, found[-1].group, found[-1].label())
        if name in known:
            found.pop()
            continue
        known.add(name)
        say(f"simulated {len(found)} of {min(most, len(kept))}: {way.label()}")
    return found


def explained(ways: list[Way]) -> tuple[Way, ...]:
    """`ways` with what each is kept for."""
    best: dict[str, list[str]] = {}
    for axis, said in zip(AXES, ("fastest", "cheapest", "least energy", "least CO2", "lowest loss"), strict=True):
        known = [(value, place) for place, way in enumerate(ways) if (value := way.axes()[axis]) is not None]
        if known:
            best.setdefault(str(min(known)[1]), []).append(said)
    return tuple(
        replace(way, why=", ".join(best.get(str(place), ["within the error bars of the front"])))
        for place, way in enumerate(ways)
    )


def here(goal: Goal) -> bool:
    """Whether this machine is among those of `goal`."""
    return HERE in goal.machines
