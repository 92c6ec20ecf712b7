"""Places all jobs on sites whose devices they share: job after job by its optimum, then each again in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hone.base.errors import FitError
from hone.plan.carbon.grid import Grid
from hone.plan.carbon.jobs import Job
from hone.plan.carbon.slots import Piece, elastic, interruptible, price, whole

Placed = Mapping[str, Sequence[Piece]]
ROUNDS = 8
"""Most turns in which every job is placed again."""
RENTS, STEP = 40, 1.0
"""Most turns in which rents are adjusted, and the first length of a step (of Polyak's)."""
GROUP, GROUPS, PATIENCE = 4, 40, 200
"""Most jobs of a group that is placed again at once, most groups a job, and groups in a row without a gain after which it ends
(or five for each job, where that is more)."""


def capacity(grid: Grid) -> np.ndarray:
    """Devices [sites, slots] before any job is placed; a large number where a site has no limit."""
    each = [np.inf if site.devices is None else site.devices for site in grid.spec.sites]
    return np.array(each, float)[:, None] + np.zeros((1, grid.num_slots))


def take(free: np.ndarray, job: Job, pieces: Sequence[Piece], sign: int = -1) -> None:
    """Takes the devices of `pieces` from `free`, or gives them back with `sign` 1."""
    most: dict[tuple[int, int], int] = {}
    for one in pieces:
        most[one.site, one.slot] = max(most.get((one.site, one.slot), 0), one.workers)
    for (site, slot), workers in most.items():
        free[site, slot] += sign * workers * job.devices


def best(grid: Grid, job: Job, free: np.ndarray, rent: np.ndarray | None = None) -> list[Piece] | None:
    """The cheapest pieces of `job` in what is free, where a device also costs `rent` [sites, slots] an hour; None: there are none."""
    first, last = grid.span(job)
    begin, end = max(0, first), min(last, grid.num_slots)
    if begin >= end:
        return None
    narrow = grid.slots(job, free, begin, end)
    if isinstance(rent, np.ndarray):
        narrow = replace(narrow, cost=narrow.cost + job.devices * rent[:, begin:end])
    if job.mode == "whole":
        found = whole(narrow, job.hours)
    elif job.mode == "elastic":
        room = np.where(np.isfinite(free), free, len(job.speedups) * job.devices)
        found = elastic(narrow, job.hours, job.speedups, (room[:, begin:end] // job.devices).astype(int))
    else:
        found = interruptible(narrow, job.hours)
    return None if found is None else [one._replace(slot=one.slot + begin) for one in found]


def soonest(grid: Grid, job: Job, free: np.ndarray) -> list[Piece] | None:
    """`job` run at once at its usual site, in one piece as soon as devices are free: what is done without a plan."""
    first, last = grid.span(job)
    site = grid.sites(job)[0]
    length = int(np.ceil(job.hours / grid.step_h - 1e-9))
    room = free[site, first:last] >= job.devices
    for start in range(len(room) - length + 1):
        if room[start : start + length].all():
            parts = [grid.step_h] * (length - 1) + [job.hours - grid.step_h * (length - 1)]
            return [Piece(first + start + k, site, part) for k, part in enumerate(parts)]
    return None


def in_turns(grid: Grid) -> tuple[dict[str, list[Piece]], float]:
    """All jobs, one after another, and a lower bound of what any placement costs (in the objective's unit).

    Where sites share few devices, jobs pay a rent for contested slots, which rises where too many want one and falls where
    none does (Lagrangian relaxation, Held and Karp 1971): a job that loses little by going elsewhere does, and the sum of
    the jobs' own optima, less the rents, is the bound. The best placement found is improved in small groups. FitError: in
    no order is there room for all before their deadlines.
    """
    orders = (
        sorted(grid.spec.jobs, key=lambda job: -job.kw * job.hours),
        sorted(grid.spec.jobs, key=lambda job: _slack(grid, job)),
    )
    found: list[tuple[float, dict[str, list[Piece]]]] = []
    failed = None
    for order in orders:
        try:
            placed = _in_order(grid, order, best)
            found.append((total(grid, placed), placed))
        except FitError as error:
            failed = failed or error
    bound = -np.inf
    rent = np.zeros(grid.grams.shape)
    limited = any(site.devices is not None for site in grid.spec.sites)
    for turn in range(RENTS if limited and len(grid.spec.jobs) > 1 else 1):
        low, demand = _relaxed(grid, rent)
        bound = max(bound, low)
        over = demand - np.where(np.isfinite(capacity(grid)), capacity(grid), np.inf)
        over[~np.isfinite(over)] = 0.0
        over[(rent <= 0) & (over < 0)] = 0.0
        if turn and turn % 3 == 0:
            try:
                placed = _in_order(grid, orders[turn % 2], lambda *of: best(*of, rent))  # noqa: B023  # used at once
                found.append((total(grid, placed), placed))
            except FitError as error:
                failed = failed or error
        value = min((cost for cost, _ in found), default=abs(bound) * 1.2)
        size = float((over**2).sum()) * grid.step_h
        if not size or value - bound <= 1e-6 * abs(value):
            break
        rent = np.maximum(0.0, rent + STEP * 0.95**turn * (value - bound) / size * over)
    if not found:
        assert failed is not None
        raise failed
    placed = min(found, key=lambda one: one[0])[1]
    if limited:
        _improve(grid, placed, rent, bound)
    return placed, bound


def _relaxed(grid: Grid, rent: np.ndarray) -> tuple[float, np.ndarray]:
    """The lower bound with `rent` and the devices [sites, slots] that jobs want where each ignores the others. FitError: one fits nowhere."""
    free, demand = capacity(grid), np.zeros(grid.grams.shape)
    low = 0.0
    for job in grid.spec.jobs:
        pieces = best(grid, job, free, rent)
        if pieces is None:
            raise too_little(grid, job)
        low += cost_of(grid, job, pieces)
        for one in pieces:
            share = (one.hours + one.lost) * one.workers * job.devices
            low += share * float(rent[one.site, one.slot])
            demand[one.site, one.slot] += share / grid.step_h
    room = np.where(np.isfinite(free), free, 0.0)
    return low - float((rent * room).sum()) * grid.step_h, demand


def _improve(grid: Grid, placed: dict[str, list[Piece]], rent: np.ndarray, bound: float) -> None:
    """Places jobs of `placed` again, each alone and then in groups that overlap, and keeps what is cheaper.

    Large neighbourhood search (Shaw 1998): in a group all but the last pay the rents or leave some hours free, so that one
    goes where it loses little. It is the same in every run.
    """
    jobs = {job.name: job for job in grid.spec.jobs}
    spans = {name: grid.span(job) for name, job in jobs.items()}
    costs = {name: cost_of(grid, jobs[name], pieces) for name, pieces in placed.items()}
    free = capacity(grid)
    for name, pieces in placed.items():
        take(free, jobs[name], pieces)

    def again(names: Sequence[str], kept_free: np.ndarray | float = 0.0, paid: float = 0.0) -> bool:
        old = {name: placed[name] for name in names}
        for name in names:
            take(free, jobs[name], old[name], 1)
        new: dict[str, list[Piece]] = {}
        for name in names:
            found = best(
                grid,
                jobs[name],
                free - kept_free if not new else free,
                paid * rent if paid and name != names[-1] else None,
            )
            if found is None:
                break
            new[name] = found
            take(free, jobs[name], found)
        fresh = {name: cost_of(grid, jobs[name], found) for name, found in new.items()}
        if len(new) == len(names) and sum(fresh.values()) < sum(costs[name] for name in names) * (1 - 1e-9):
            placed.update(new)
            costs.update(fresh)
            return True
        for name, found in new.items():
            take(free, jobs[name], found, 1)
        for name in names:
            take(free, jobs[name], old[name])
        return False

    for _ in range(ROUNDS):
        if not sum(again([name]) for name in jobs):
            break
    chance = random.Random(0)
    limited = [place for place, site in enumerate(grid.spec.sites) if site.devices is not None]
    idle = 0
    for _ in range(GROUPS * len(jobs) if len(jobs) > 1 else 0):
        if idle > max(PATIENCE, 5 * len(jobs)) or sum(costs.values()) - bound < 1e-3 * abs(bound):
            break
        idle += 1
        first = chance.choice([*jobs])
        begin, end = spans[first]
        near = [name for name in jobs if name != first and spans[name][0] < end and begin < spans[name][1]]
        if not near:
            continue
        group = [first, *chance.sample(near, min(len(near), chance.randint(1, GROUP - 1)))]
        # The first leaves some hours of a site to the others, which it would take if it were asked alone.
        kept, start = np.zeros(free.shape), chance.randrange(begin, max(begin + 1, end))
        if chance.random() < 0.5:
            kept[chance.choice(limited), start : start + chance.randint(0, max(1, (end - begin) // 4))] = np.inf
        else:
            kept[chance.choice(limited), begin:end] = np.inf
        if again(group, kept, chance.choice((0.0, 0.5, 1.0, 1.5))):
            idle = 0


def at_once(grid: Grid) -> dict[str, list[Piece]]:
    """All jobs in the order of their arrival, each at its usual site as soon as there is room. FitError: a deadline is missed."""
    return _in_order(grid, sorted(grid.spec.jobs, key=lambda job: grid.span(job)[0]), soonest)


def _in_order(
    grid: Grid, jobs: Sequence[Job], place: Callable[[Grid, Job, np.ndarray], list[Piece] | None]
) -> dict[str, list[Piece]]:
    free, placed = capacity(grid), {}
    for job in jobs:
        found = place(grid, job, free)
        if found is None:
            raise too_little(grid, job)
        placed[job.name] = found
        take(free, job, found)
    return placed


def too_little(grid: Grid, job: Job) -> FitError:
    """The error for a job that finds no room before its deadline."""
    first, last = grid.span(job)
    hours = max(0, last - first) * grid.step_h
    if hours < job.hours / job.speedups[-1]:
        return FitError(
            f"job {job.name} needs {job.hours:g} h and has {hours:g} h from {grid.at(first):%Y-%m-%d %H:%M} to its deadline",
            fix=f"set its deadline to {grid.at(first + np.ceil(job.hours / grid.step_h)):%Y-%m-%d %H:%M} or later, or give it fewer hours",
        )
    return FitError(
        f"job {job.name} ({job.devices} devices, {job.hours:g} h) finds too little room among the others before "
        f"{job.deadline:%Y-%m-%d %H:%M}",
        fix="move its deadline, give a site more devices, or allow it more sites; or set method: exact, which looks for room for all at once",
    )


def _slack(grid: Grid, job: Job) -> float:
    first, last = grid.span(job)
    return (last - first) * grid.step_h - job.hours


def cost_of(grid: Grid, job: Job, pieces: Sequence[Piece]) -> float:
    """The objective of one job: grams, or dollars with the price of carbon."""
    begin, end = pieces[0].slot, pieces[-1].slot + 1
    slots = grid.slots(job, np.full((len(grid.grams), 1), np.inf) + np.zeros((1, end)), begin, end)
    return price(slots, [one._replace(slot=one.slot - begin, hours=one.hours * one.workers) for one in pieces])


def total(grid: Grid, placed: Placed) -> float:
    """The objective of all jobs: grams, or dollars with the price of carbon."""
    return sum(cost_of(grid, job, placed[job.name]) for job in grid.spec.jobs)
