"""Machines that may be taken away: recorded or made traces of availability, and policies that meet a deadline on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import FitError, SpecError

IDLE, SPOT, ON_DEMAND = 0, 1, 2


@dataclass(frozen=True)
class SpotTrace:
    """Whether a spot machine could be had, `up` [ticks] of `gap_s` seconds each."""

    up: np.ndarray
    gap_s: float
    source: str

    @property
    def availability(self) -> float:
        """Share of ticks with a machine."""
        return float(self.up.mean())

    @property
    def mean_up_h(self) -> float:
        """Mean hours of a time without interruption."""
        starts = int(self.up[0]) + int((np.diff(self.up.astype(int)) == 1).sum())
        return float(self.up.sum()) * self.gap_s / 3600 / max(starts, 1)


def read_trace(path: Path, needed: int = 1) -> SpotTrace:
    """A trace of github.com/skypilot-org/spot-traces: JSON with metadata.gap_seconds and data, machines to be had at each tick.

    A tick counts where `needed` machines or more are there. SpecError: another form.
    """
    try:
        values = json.loads(path.read_text(encoding="utf8"))
        gap, data = float(values["metadata"]["gap_seconds"]), np.array([float(one) for one in values["data"]])
    except FileNotFoundError:
        raise SpecError(f"no file {path} of a spot trace", fix="check the path") from None
    except (ValueError, KeyError, TypeError):
        raise SpecError(
            f"{path} is no trace of spot machines",
            fix="it needs metadata.gap_seconds and a list `data` of machines at each tick",
        ) from None
    if gap <= 0 or not len(data):
        raise SpecError(f"{path} has {len(data)} ticks of {gap:g} s", fix="give one or more ticks of more than 0 s")
    return SpotTrace(data >= needed, gap, path.name)


def made_trace(availability: float, mean_up_h: float, hours: float, gap_s: float = 300.0, seed: int = 0) -> SpotTrace:
    """A two-state Markov chain with this share of time up and this mean time up: without the clusters that recorded ones have."""
    up, down = mean_up_h, mean_up_h * (1 - availability) / availability
    draw = np.random.default_rng(seed)
    state, states = draw.random() < availability, []
    while len(states) < hours * 3600 / gap_s:
        length = max(1, round(draw.exponential(up if state else down) * 3600 / gap_s))
        states += [state] * length
        state = not state
    ticks = np.array(states[: int(hours * 3600 / gap_s)], bool)
    return SpotTrace(ticks, gap_s, f"made: up {availability:.0%} of the time, {mean_up_h:g} h at once (seed {seed})")


class Spent(NamedTuple):
    """What a policy took: hours on spot and on demand, changes of machine, the hour of its end."""

    spot_h: float
    on_demand_h: float
    changes: int
    end_h: float

    def usd(self, spot: float, on_demand: float) -> float:
        """The price, from the prices of an hour of each."""
        return self.spot_h * spot + self.on_demand_h * on_demand


class _Now(NamedTuple):
    """What a policy sees at a tick; times in ticks. `left` is work to do, and what a change costs is `change`."""

    tick: int
    left: float
    total: float
    deadline: int
    change: float
    state: int
    up: bool


Policy = Callable[[_Now], int]


def always_on_demand(now: _Now) -> int:
    """An on-demand machine from the start: the price that all is measured against."""
    return ON_DEMAND


def greedy_spot(now: _Now) -> int:
    """Spot whenever there is one, else nothing, until only an on-demand machine can still meet the deadline."""
    return ON_DEMAND if _must(now) else SPOT if now.up else IDLE


def uniform_progress(now: _Now) -> int:
    """Keeps to the line of work over time up to the deadline: on demand where it is behind and there is no spot.

    Wu et al., Can't Be Late (NSDI 2024): spot where there is one, else wait while ahead of the line; an on-demand machine is
    kept until it is ahead by what two changes cost, and for good where only it can still meet the deadline.
    """
    if _must(now):
        return ON_DEMAND
    if now.up and now.state != ON_DEMAND:
        return SPOT
    done, line = now.total - now.left, now.total / now.deadline
    if now.state == ON_DEMAND:
        ahead = done >= line * (now.tick + 2 * now.change)
        return (SPOT if now.up else IDLE) if ahead else ON_DEMAND
    return ON_DEMAND if done < line * now.tick else IDLE


def _must(now: _Now) -> bool:
    """Whether an on-demand machine must run from now on: a spot that is taken away in the next tick would leave too little time."""
    changes = 2 if now.up and now.state != SPOT else 1
    return now.left + changes * now.change + 1 >= now.deadline - now.tick


POLICIES: dict[str, Policy] = {
    "always on demand": always_on_demand,
    "greedy spot": greedy_spot,
    "uniform progress": uniform_progress,
}


def follow(
    policy: Policy, trace: SpotTrace, work_h: float, deadline_h: float, change_h: float, start: int = 0
) -> Spent:
    """`policy` on `trace` from the tick `start`: hours and changes. Each new machine takes `change_h` before work goes on.

    FitError: the deadline is too early even for one on-demand machine, or was missed. SpecError: the trace is too short.
    """
    scale = 3600 / trace.gap_s
    total, deadline, change = work_h * scale, int(deadline_h * scale + 1e-9), change_h * scale
    if total + change > deadline:
        raise FitError(
            f"{work_h:g} h of work and {change_h:g} h to start do not fit into {deadline_h:g} h",
            fix=f"set the deadline to {work_h + change_h:g} h or more",
        )
    if start + deadline > len(trace.up):
        raise SpecError(
            f"the trace has {len(trace.up) / scale:.1f} h and the job needs {(start + deadline) / scale:.1f} h",
            fix="give a longer trace",
        )
    left, state, changes = total, IDLE, 0
    ticks = {SPOT: 0.0, ON_DEMAND: 0.0}
    for tick in range(deadline):
        up = bool(trace.up[start + tick])
        if state == SPOT and not up:
            state = IDLE
        wanted = policy(_Now(tick, left, total, deadline, change, state, up))
        if wanted != state and wanted != IDLE:
            left, changes = left + change, changes + 1
        state = wanted
        if state == IDLE:
            continue
        used = min(1.0, left)
        ticks[state] += used
        left -= used
        if left <= 1e-9:
            return Spent(ticks[SPOT] / scale, ticks[ON_DEMAND] / scale, changes, (tick + used) / scale)
    raise FitError(
        f"the deadline was missed with {left / scale:.2f} h of work left", fix="give more time, or cheaper changes"
    )


def foresight_usd(
    trace: SpotTrace, work_h: float, deadline_h: float, change_h: float, spot: float, on_demand: float, start: int = 0
) -> float:
    """The least price of any policy that knows the whole trace: a dynamic program over ticks, machine and work left.

    Work and changes count in whole ticks, rounded up.
    """
    scale = 3600 / trace.gap_s
    total, deadline, change = (
        int(np.ceil(work_h * scale - 1e-9)),
        int(deadline_h * scale + 1e-9),
        int(np.ceil(change_h * scale - 1e-9)),
    )
    most = total + change * 64
    least = np.full((3, most + 1), np.inf)
    least[:, 0] = 0.0
    price = (0.0, spot / scale, on_demand / scale)
    for tick in range(deadline - 1, -1, -1):
        fresh = np.full((3, most + 1), np.inf)
        fresh[:, 0] = 0.0
        up = bool(trace.up[start + tick])
        for state in (IDLE, SPOT, ON_DEMAND):
            best = least[IDLE, 1:].copy()
            for machine in (SPOT, ON_DEMAND):
                if machine == SPOT and not up:
                    continue
                new = 0 if machine == state else change
                ran = np.full(most, np.inf)
                ran[: most - new] = price[machine] + least[machine, new:most]
                best = np.minimum(best, ran)
            fresh[state, 1:] = best
        least = fresh
    return float(least[IDLE, total])
