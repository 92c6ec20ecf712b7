"""Goodput: the highest rate of requests at which enough of them are answered in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hone.base.errors import SpecError
from hone.plan.simulate.figures import Goal, attainment
from hone.plan.simulate.replica import EngineSizes, Served
from hone.plan.simulate.run import Conduct, simulate
from hone.plan.simulate.steps import StepTimes
from hone.plan.simulate.traces import Trace

_MOST_DOUBLINGS = 20


@dataclass(frozen=True)
class Goodput:
    """The highest rate (requests/s) found, the part of requests that met the goal there, and every (rate, part) that was tried.

    `rate` is 0 where even one request at a time is too slow; a part is None where a run was stopped, its goal already missed.
    """

    rate: float
    attainment: float | None
    tried: tuple[tuple[float, float | None], ...]


def goodput(
    at: Callable[[float], Trace],
    sizes: EngineSizes,
    steps: StepTimes,
    goal: Goal,
    *,
    start: float,
    wanted: float = 0.9,
    warmup: float = 0.1,
    tolerance: float = 0.02,
    conduct: Conduct | None = None,
) -> Goodput:
    """Bisects the rate on a logarithmic axis: the highest at which `wanted` of the requests meet TTFT and TPOT together.

    `at(rate)` is the trace at a rate, of the same seed at all. Found to `tolerance`, from `start` on by factors of two. A run ends
    as soon as so many requests are late that the goal is missed whatever comes: a queue that grows without bound is not followed.
    Zhong et al. 2024 (DistServe), arXiv:2401.09670.
    """
    if not 0 < wanted <= 1:
        raise SpecError(f"attainment {wanted} is no part of the requests", fix="give a number above 0, at most 1")
    tried: dict[float, float | None] = {}

    def good(rate: float) -> bool:
        trace = at(rate)
        watch = _Lateness(
            goal,
            int(len(trace.arrivals) * warmup),
            (1 - wanted) * (len(trace.arrivals) - int(len(trace.arrivals) * warmup)),
        )
        run = simulate(trace, sizes, steps, replace(conduct or Conduct(), stop=watch))
        tried[rate] = None if run.stopped else attainment(run.served, goal, warmup)
        part = tried[rate]
        return part is not None and part >= wanted

    low, high = start, start
    if good(start):
        for _ in range(_MOST_DOUBLINGS):
            low, high = high, 2 * high
            if not good(high):
                break
        else:
            raise SpecError(f"even {high:.3g} requests/s meet the goal", fix="give longer requests or a shorter goal")
    else:
        for _ in range(_MOST_DOUBLINGS):
            low, high = low / 2, low
            if good(low):
                break
        else:
            return Goodput(0.0, None, tuple(sorted(tried.items())))
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return Goodput(low, tried[low], tuple(sorted(tried.items())))


class _Lateness:
    """Counts requests that missed their goal; says stop once there are more than `allowed`."""

    def __init__(self, goal: Goal, warmup: int, allowed: float) -> None:
        self._goal, self._warmup, self._allowed = goal, warmup, allowed
        self._late: set[int] = set()

    def __call__(self, served: Served) -> bool:
        late = served.ttft_s is not None and served.ttft_s > self._goal.ttft_s
        if served.number >= self._warmup and (late or (served.last_s is not None and not self._goal.met(served))):
            self._late.add(served.number)
        return len(self._late) > self._allowed + 1e-9
