"""Runs a trace through a fleet: every request with its times, and the sums from which the figures are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hone.plan.simulate.disaggregated import Disaggregation, TwoFleets
from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.fleet import Fleet, Member
from hone.plan.simulate.replica import EngineSizes, Served
from hone.plan.simulate.steps import StepTimes
from hone.plan.simulate.traces import Trace


@dataclass
class SimulatedRun:
    """What happened: requests in the order of their arrival, the fleet at its end, and the time that passed."""

    served: list[Served]
    fleet: Fleet
    end_s: float
    in_system_s: float
    """Integral over time of the number of requests in the system: what Little's law compares with the sum of their times."""
    stopped: bool = False
    """Whether `stop` ended it before all requests were done."""
    apart: TwoFleets | None = None
    """With prefill replicas of their own; `fleet` is then that which decodes."""

    @property
    def members(self) -> list[Member]:
        """All replicas there ever were."""
        return self.fleet.members + (self.apart.prefill.members if self.apart else [])

    @property
    def unfinished(self) -> int:
        """Requests that were not done when it ended."""
        return sum(one.last_s is None for one in self.served)


@dataclass
class _Area:
    """Integral of a number over time."""

    number: int = 0
    at_s: float = 0.0
    total: float = 0.0

    def change(self, by: int, now: float) -> None:
        self.total += self.number * (now - self.at_s)
        self.number, self.at_s = self.number + by, now


@dataclass
class Conduct:
    """Who looks at a run while it goes on: `begin` may put events into the loop, `stop` ends it early."""

    begin: Callable[[EventLoop, Fleet], None] = lambda loop, fleet: None
    stop: Callable[[Served], bool] = lambda served: False
    came: Callable[[Served], None] = lambda served: None
    replicas: int = 1
    most: int | None = None
    options: dict[str, float] = field(default_factory=dict)
    apart: Disaggregation | None = None


def simulate(trace: Trace, sizes: EngineSizes, steps: StepTimes, conduct: Conduct | None = None) -> SimulatedRun:
    """Serves `trace` on `conduct.replicas` engines of `sizes`, or on those of `conduct.apart`, whose steps take what `steps` says.

    Prompts longer than `max_model_len` allows must have been left out (`fitting`). Every request is done in the end, unless
    `conduct.stop` says after a token that enough is known.
    """
    conduct = conduct or Conduct()
    loop, area = EventLoop(), _Area()
    served: list[Served] = []
    left = len(trace.arrivals)

    def on_token(one: Served, now: float) -> None:
        nonlocal left
        if one.last_s is not None:
            area.change(-1, now)
            served_by.finished(one)
            left -= 1
        if conduct.stop(one):
            loop.stopped = True
        elif not left:
            loop.stopped = True  # those who look at it would go on for ever

    apart = None if conduct.apart is None else TwoFleets(loop, sizes, steps, on_token, conduct.apart)
    if apart is None:
        fleet = Fleet(loop, sizes, steps, on_token, most=conduct.most or conduct.replicas, **conduct.options)  # type: ignore[arg-type]
        for _ in range(conduct.replicas):
            fleet.start()
    else:
        fleet = apart.decode
    served_by = apart or fleet

    def come(number: int) -> None:
        arrival = trace.arrivals[number]
        one = Served(number, arrival.time_s, arrival.prompt_tokens, arrival.output_tokens)
        served.append(one)
        area.change(1, loop.now)
        conduct.came(one)
        if number + 1 < len(trace.arrivals):
            loop.at(trace.arrivals[number + 1].time_s, partial(come, number + 1))
        served_by.submit(one, arrival.tokens(number))

    loop.at(trace.arrivals[0].time_s, partial(come, 0))
    conduct.begin(loop, fleet)
    loop.run()
    area.change(0, loop.now)
    assert loop.stopped or not left, f"{left} requests were never served"
    return SimulatedRun(served, fleet, loop.now, area.total, stopped=left > 0, apart=apart)


def fitting(trace: Trace, sizes: EngineSizes) -> tuple[Trace, int]:
    """`trace` without the requests that the engine would refuse or cut short, and how many those are."""
    longest = min(sizes.max_model_len, sizes.num_pages * sizes.block_size)
    kept = tuple(one for one in trace.arrivals if one.prompt_tokens + one.output_tokens <= longest)
    return Trace(kept, trace.source), len(trace.arrivals) - len(kept)
