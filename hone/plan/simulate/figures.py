"""The figures of a simulated run: percentiles, attainment of goals, throughput, utilization, pages, joules; and its requests as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hone.base.figure import Figure
from hone.plan.simulate.replica import Served
from hone.plan.simulate.run import SimulatedRun

TPOT = "(time of the last token - time of the first) / (output tokens - 1)"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Goal:
    """Seconds within which the first token is due, and each one after it on average (`TPOT`); both together count."""

    ttft_s: float
    tpot_s: float

    def met(self, served: Served) -> bool:
        """Whether a finished request was answered in time."""
        ttft, tpot = served.ttft_s, served.tpot_s
        return ttft is not None and ttft <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


@dataclass(frozen=True)
class Power:
    """Watts of one replica while its device computes, and while it does not."""

    busy_w: float
    idle_w: float
    how: str = "quoted"


def counted(served: Sequence[Served], warmup: float) -> list[Served]:
    """The finished requests without the first part, `warmup` of all: the system was empty when they came."""
    return [one for one in served[int(len(served) * warmup) :] if one.last_s is not None]


def attainment(served: Sequence[Served], goal: Goal, warmup: float = 0.0) -> float | None:
    """The part of the counted requests that met `goal`; None where there is none."""
    rows = counted(served, warmup)
    return sum(map(goal.met, rows)) / len(rows) if rows else None


def littles_gap(run: SimulatedRun) -> float:
    """Relative difference between requests in the system on average and rate x mean time in it; 0 by Little's law (1961)."""
    spent = sum((run.end_s if one.last_s is None else one.last_s) - one.arrived_s for one in run.served)
    return abs(run.in_system_s - spent) / max(spent, 1e-12)


def figures(
    run: SimulatedRun, goal: Goal, *, warmup: float = 0.0, power: Power | None = None, bound: bool = False
) -> list[Figure]:
    """Every figure of a run, modelled. `bound`: step times were limits of the hardware, so that latencies are lower limits.

    Raises AssertionError where Little's law does not hold: then the simulator itself is wrong.
    """
    gap = littles_gap(run)
    assert gap < 1e-6, f"Little's law is off by {gap:.2g}: a request was counted twice or not at all"
    rows = counted(run.served, warmup)
    note = "step times are limits of the hardware: nothing is calibrated" if bound else "predicted step times"
    found: list[Figure] = []

    def add(name: str, value: float | None, unit: str, n: int = len(rows), more: str = "") -> None:
        said = "; ".join(filter(None, (more, note)))
        found.append(Figure(name=name, value=value, unit=unit, how="modelled", n=max(n, 1), note=said))

    for name, more in (
        ("ttft_s", ""),
        ("tpot_s", TPOT),
        ("e2e_s", ""),
        ("queue_s", "until the first step with some of it"),
    ):
        values = [value for one in rows if (value := getattr(one, name)) is not None]
        for percent in PERCENTILES:
            value = float(np.percentile(values, percent)) if values else None
            add(f"{name.removesuffix('_s')}_p{percent}_s", value, "s", len(values), more)
    add(
        "attainment",
        attainment(run.served, goal, warmup),
        "fraction",
        more=f"TTFT <= {goal.ttft_s:g} s and TPOT <= {goal.tpot_s:g} s",
    )
    span = run.end_s - run.served[0].arrived_s
    done = [one for one in run.served if one.last_s is not None]
    for name, total, unit in (
        ("requests_per_s", len(done), "requests/s"),
        ("output_tokens_per_s", sum(one.output_tokens for one in done), "tokens/s"),
        ("prompt_tokens_per_s", sum(one.prompt_tokens for one in done), "tokens/s"),
    ):
        add(name, total / span if span > 0 else None, unit, len(done))
    counts = [member.replica.counts for member in run.members]
    alive = sum(member.alive_s(run.end_s) for member in run.members)
    busy, steps = (sum(getattr(one, name) for one in counts) for name in ("busy_s", "steps"))
    add("utilization", busy / alive if alive else None, "fraction", steps, "of a replica's time, its device computes")
    add("sequences_per_step", sum(one.sequences for one in counts) / steps if steps else None, "", steps)
    fills = [member.replica.scheduler.fill for member in run.members]
    slots, empty, used, looks = (
        sum(getattr(one, name) for one in fills) for name in ("slots", "empty_slots", "used_pages", "looks")
    )
    add(
        "page_waste",
        empty / slots if slots else None,
        "fraction",
        looks,
        "of the slots in used pages, those behind the last token",
    )
    pages = run.fleet.sizes.num_pages
    add("pages_used", used / looks / pages if looks else None, "fraction", looks)
    looking = run.members if run.apart is None else run.apart.prefill.members
    asked = sum(one.replica.scheduler.pages.prefix_queries for one in looking)
    hits = sum(one.replica.scheduler.pages.prefix_hits for one in looking)
    add("prefix_hit_rate", hits / asked if asked else None, "fraction", more="of prompt tokens")
    add("preemptions", sum(one.replica.scheduler.num_preemptions for one in run.members), "")
    add("replica_hours", alive / 3600, "h", len(run.members))
    add(*_energy(power, busy, alive, sum(one.output_tokens for one in done)))
    return found


def _energy(power: Power | None, busy_s: float, alive_s: float, tokens: int) -> tuple[str, float | None, str, int, str]:
    if power is None:
        return "joules_per_token", None, "J/token", 1, "the power of a replica is unknown: give busy_w and idle_w"
    joules = power.busy_w * min(busy_s, alive_s) + power.idle_w * max(alive_s - busy_s, 0.0)
    return (
        "joules_per_token",
        joules / tokens if tokens else None,
        "J/token",
        tokens,
        f"{power.how} {power.busy_w:g} W busy, {power.idle_w:g} W idle",
    )


COLUMNS = (
    "request", "arrived_s", "prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "e2e_s", "preemptions", "replica",
)  # fmt: skip


def to_csv(served: Iterable[Served]) -> str:
    """One line a request; an empty cell is a time that does not exist (TPOT of one token, an unfinished request)."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(COLUMNS)
    for one in served:
        times = ["" if value is None else f"{value:.6f}" for value in (one.queue_s, one.ttft_s, one.tpot_s, one.e2e_s)]
        write(
            [
                one.number,
                f"{one.arrived_s:.6f}",
                one.prompt_tokens,
                one.cached_tokens,
                one.output_tokens,
                *times,
                one.preemptions,
                one.replica,
            ]
        )
    return out.getvalue()
