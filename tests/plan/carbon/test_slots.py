"""One job's slots: against all subsets, against an LP, and against HiGHS where restarts and moves cost."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from hone.plan.carbon.exact import Optimum
from hone.plan.carbon.grid import Grid, spans_of
from hone.plan.carbon.jobs import Job, Schedule, Site
from hone.plan.carbon.place import best, capacity, total
from hone.plan.carbon.slots import Piece, Slots, elastic, interruptible, price, whole

START = datetime(2020, 6, 1, tzinfo=UTC)


def grid_of(grams: np.ndarray, jobs: list[Job], devices: int | None = None, **fields: object) -> Grid:
    """A grid of made intensities, an hour a slot."""
    sites = tuple(Site(name=f"s{place}", devices=devices) for place in range(len(grams)))
    spec = Schedule(start=START, sites=sites, jobs=tuple(jobs), **fields)
    return Grid(spec, grams, np.zeros(grams.shape), "average", ("made",))


def job_of(hours: float, slots: int, **fields: object) -> Job:
    return Job(
        name=str(fields.pop("name", "j")), hours=hours, power_kw=1.0, deadline=START + timedelta(hours=slots), **fields
    )


@pytest.mark.parametrize("seed", range(5))
def test_stops_without_losses_are_the_best_subset(seed: int):
    cost = np.random.default_rng(seed).uniform(1, 9, (1, 9))
    found = interruptible(Slots(cost, 1.0), 3.5)
    assert found is not None
    least = min(
        sum(cost[0, slot] for slot in subset) - 0.5 * max(cost[0, slot] for slot in subset)
        for subset in itertools.combinations(range(9), 4)
    )
    assert price(Slots(cost, 1.0), found) == pytest.approx(least)
    assert sum(one.hours for one in found) == pytest.approx(3.5)


@pytest.mark.parametrize("hours", [1.0, 2.5, 4.0, 9.0])
def test_whole_runs_are_the_best_window(hours: float):
    cost = np.random.default_rng(1).uniform(1, 9, (3, 9))
    cost[0, 4] = np.inf
    found = whole(Slots(cost, 1.0), hours)
    assert found is not None
    full, rest = int(hours), hours % 1
    windows = [
        cost[site, start : start + full].sum() + (rest * cost[site, start + full] if rest else 0)
        for site in range(3)
        for start in range(9 - full + (0 if rest else 1))
    ]
    assert price(Slots(cost, 1.0), found) == pytest.approx(min(windows))
    assert whole(Slots(cost, 1.0), 9.5) is None


@pytest.mark.parametrize("seed", range(4))
def test_restarts_and_moves_agree_with_highs(seed: int):
    """The dynamic program, whose unit is 5 minutes here, and a mixed-integer program of the same costs."""
    grams = np.random.default_rng(seed).uniform(50, 400, (2, 10))
    job = job_of(4.0, 10, checkpoint="900GB", restart_minutes=15)
    grid = grid_of(grams, [job])
    found = best(grid, job, capacity(grid))
    assert found is not None and sum(one.hours for one in found) == pytest.approx(4.0)
    optimum = Optimum(grid)
    assert optimum.proven and optimum.value == pytest.approx(total(grid, optimum.placed), rel=1e-6)
    assert total(grid, {"j": found}) >= optimum.value * (1 - 1e-9)
    assert total(grid, {"j": found}) <= optimum.value * 1.005  # work is in units of 5 minutes, a move takes 27


def test_losses_make_runs_longer():
    grams = np.array([[10.0, 90.0, 10.0, 90.0, 10.0, 90.0, 30.0, 30.0, 30.0]])
    free, dear = job_of(3.0, 9), job_of(3.0, 9, restart_minutes=55)
    grid = grid_of(grams, [free])
    assert [one.slot for one in best(grid, free, capacity(grid))] == [0, 2, 4]
    kept = best(grid, dear, capacity(grid))
    assert [one.slot for one in kept] == [6, 7, 8] and all(one.lost == 0 for one in kept)


def test_elastic_greedy_is_the_optimum_of_its_linear_program():
    from scipy.optimize import linprog

    cost = np.random.default_rng(3).uniform(1, 9, (1, 12))
    speedups = (1.0, 1.8, 2.3)
    found = elastic(Slots(cost, 1.0), 7.3, speedups)
    assert found is not None
    gains = np.diff([0.0, *speedups])
    exact = linprog(np.repeat(cost[0], 3), A_eq=[np.tile(gains, 12)], b_eq=[7.3], bounds=(0, 1))
    mine = sum(cost[0, one.slot] * one.hours * one.workers for one in found)
    assert mine == pytest.approx(exact.fun)
    assert sum(one.hours * speedups[one.workers - 1] for one in found) == pytest.approx(7.3)


def test_parts_of_slots_lie_where_they_touch():
    spans = spans_of([Piece(2, 0, 0.5), Piece(3, 0, 1.0), Piece(5, 0, 0.25)], 1.0)
    assert spans == [(2.5, 4.0, 0, 1), (5.0, 5.25, 0, 1)]
