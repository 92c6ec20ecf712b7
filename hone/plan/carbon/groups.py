"""Improves a placement of many jobs by exact optima of small groups of them, the others staying where they are."""

from __future__ import annotations

import random

from hone.base.errors import FitError
from hone.plan.carbon.exact import Optimum
from hone.plan.carbon.grid import Grid
from hone.plan.carbon.jobs import Job
from hone.plan.carbon.place import capacity, cost_of, in_turns, take
from hone.plan.carbon.slots import Piece

VARIABLES = 4000
"""About the most variables of a group's program."""
GROUP, PASSES, LIMIT_S = 6, 4, 5.0
"""Most jobs of a group, most passes in which each job leads a group once, longest search for one group."""
CLOSE = 1e-3
"""Distance from the lower bound at which the search ends."""


def in_groups(grid: Grid) -> tuple[dict[str, list[Piece]], float]:
    """All jobs, and a lower bound of what any placement costs: `in_turns`, then groups that overlap solved by HiGHS.

    Each job in turn leads a group of others that could run at the same time; the optimum of the group in the devices that
    the rest leaves is kept. It ends where a pass changes nothing or the bound is near, and is the same in every run as long
    as no group takes longer than `LIMIT_S`. FitError: there is no room for all.
    """
    placed, bound = in_turns(grid)
    jobs = grid.spec.jobs
    if len(jobs) < 2 or all(site.devices is None for site in grid.spec.sites):
        return placed, bound
    spans = {job.name: grid.span(job) for job in jobs}
    costs = {job.name: cost_of(grid, job, placed[job.name]) for job in jobs}
    free = capacity(grid)
    for job in jobs:
        take(free, job, placed[job.name])
    chance = random.Random(0)
    for _ in range(PASSES):
        changed = False
        for leader in sorted(jobs, key=lambda job: spans[job.name]):
            if sum(costs.values()) - bound < CLOSE * abs(bound):
                return placed, bound
            group = _group(grid, leader, spans, chance)
            if len(group) < 2:
                continue
            for job in group:
                take(free, job, placed[job.name], 1)
            new = _optimum(grid, group, free, {job.name: placed[job.name] for job in group})
            fresh = {job.name: cost_of(grid, job, new[job.name]) for job in group}
            if sum(fresh.values()) < sum(costs[name] for name in fresh) * (1 - 1e-6):
                placed.update(new)
                costs.update(fresh)
                changed = True
            for job in group:
                take(free, job, placed[job.name])
        if not changed:
            break
    return placed, bound


def _optimum(grid: Grid, group: list[Job], free: object, now: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
    """The optimum of `group` in `free`, or `now` where HiGHS finds none in time: `now` is one, so there is always some."""
    try:
        return Optimum(grid, LIMIT_S, group, free).placed  # type: ignore[arg-type]
    except FitError:
        return now


def _group(grid: Grid, leader: Job, spans: dict[str, tuple[int, int]], chance: random.Random) -> list[Job]:
    """`leader` and others that could run at the same time at one of its sites, as many as a small program holds."""
    begin, end = spans[leader.name]
    sites = {*grid.sites(leader)}
    near = [
        job
        for job in grid.spec.jobs
        if job.name != leader.name
        and spans[job.name][0] < end
        and begin < spans[job.name][1]
        and sites & {*grid.sites(job)}
    ]
    chance.shuffle(near)
    group, size = [leader], _variables(grid, leader)
    for job in near:
        size += _variables(grid, job)
        if len(group) == GROUP or size > VARIABLES:
            break
        group.append(job)
    return group


def _variables(grid: Grid, job: Job) -> int:
    """About how many variables a job has in the program."""
    first, last = grid.span(job)
    each = 1 if job.mode == "whole" else len(job.speedups) if job.mode == "elastic" else 2
    if job.mode == "interruptible" and (job.checkpoint is not None or job.restart_minutes):
        each = 5 + (len(grid.sites(job)) if job.checkpoint is not None else 0)
    return (last - first) * len(grid.sites(job)) * each
