"""A year of jobs over three sites, by the carbon scheduler and by HiGHS: grams, distance from the optimum, regret of forecasts.

`python -m benchmarks.carbon_schedule [--jobs=180] [--limit=300] [--groups]` adds a row to benchmarks/ledger/carbon_schedule.jsonl.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime, timedelta

import numpy as np

from benchmarks.ledger import append
from hone.plan.carbon.exact import Optimum
from hone.plan.carbon.grid import grids
from hone.plan.carbon.groups import in_groups
from hone.plan.carbon.jobs import Job, Schedule, Site
from hone.plan.carbon.place import at_once, in_turns, total

START = datetime(2020, 1, 8, tzinfo=UTC)
SITES = (Site(name="DE", devices=4), Site(name="GB", devices=3), Site(name="FR", devices=1))


def year(num_jobs: int, seed: int = 0) -> Schedule:
    """About a job a day of 2 to 20 hours and 1 to 6 kW, with 12 to 48 hours of slack; a third in one piece."""
    draw = np.random.default_rng(seed)
    jobs = []
    for place in range(num_jobs):
        arrival = START + timedelta(hours=int(draw.integers(0, (366 - 12) * 24)))
        hours = int(draw.integers(2, 21))
        mode = "whole" if place % 3 == 0 else "interruptible"
        deadline = arrival + timedelta(hours=hours + int(draw.integers(12, 49)))
        jobs.append(
            Job(name=f"job-{place}", hours=hours, power_kw=float(draw.uniform(1, 6)), arrival=arrival, deadline=deadline, mode=mode)
        )  # fmt: skip
    return Schedule(start=START, sites=SITES, jobs=tuple(jobs))


def main() -> None:
    """Plans the year by each method and with each forecast; prints and writes the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=180)
    parser.add_argument("--limit", type=float, default=300.0, help="Longest search of HiGHS over the whole year, s.")
    parser.add_argument("--groups", action="store_true", help="Also the method groups, which takes minutes.")
    given = parser.parse_args()
    spec = year(given.jobs)
    _, truth = grids(spec)
    rows: list[dict[str, object]] = []

    def say(figure: str, value: float, unit: str, note: str = "") -> None:
        rows.append({"figure": figure, "value": value, "unit": unit, "n": 1, "how": "modelled", "note": note})
        print(f"{figure}: {value:.6g} {unit} {note}", flush=True)

    what = f"{given.jobs} jobs of 2020, DE 4, GB 3, FR 1 devices"
    usual = total(truth, at_once(truth)) / 1000
    say(f"{what}: at once at the first site", usual, "kg CO2e")
    begin = time.perf_counter()
    placed, bound = in_turns(truth)
    listed = total(truth, placed) / 1000
    gap = f"at most {listed / bound * 1000 - 1:.2%} above the optimum by its own bound, {time.perf_counter() - begin:.0f} s"
    say(f"{what}: list, perfect forecast", listed, "kg CO2e", gap)
    begin = time.perf_counter()
    optimum = Optimum(truth, given.limit)
    ended = "proven" if optimum.proven else f"stopped, bound {optimum.bound / 1000:.2f} kg"
    say(f"{what}: HiGHS, all at once", optimum.value / 1000, "kg CO2e", f"{ended}, {time.perf_counter() - begin:.0f} s")
    say(f"{what}: list above HiGHS's bound", listed / optimum.bound * 1000 - 1, "", "1 is 100 %")
    for how in ("perfect", "noise:0.05", "yesterday", "last_week"):
        # Each job is planned when it arrives, with what is known then, in the devices that earlier ones left.
        value = online(spec, how) / 1000
        note = f"{value / listed - 1:+.2%} against all at once with perfect foresight; saves {1 - value / usual:.1%}"
        say(f"{what}: each job at its arrival, forecast {how}", value, "kg CO2e", note)
    if given.groups:
        begin = time.perf_counter()
        placed, _ = in_groups(truth)
        value = total(truth, placed) / 1000
        note = f"{value / optimum.bound * 1000 - 1:.2%} above HiGHS's bound, {time.perf_counter() - begin:.0f} s"
        say(f"{what}: groups, perfect forecast", value, "kg CO2e", note)
    append("carbon_schedule", rows)


def online(spec: Schedule, how: str) -> float:
    """Grams of the year where each job is placed at its arrival by the forecast `how` of that hour."""
    from hone.plan.carbon.place import best, capacity, take

    _, truth = grids(spec)
    free, grams = capacity(truth), 0.0
    for job in sorted(spec.jobs, key=lambda one: one.arrival or spec.start):
        alone = spec.model_copy(update={"start": job.arrival, "forecast": how, "jobs": (job,)})
        seen, _ = grids(alone)
        first, _ = truth.span(job)
        window = free[:, first : first + seen.num_slots]
        pieces = best(seen, job, window)
        assert pieces is not None, f"{job.name} finds no room"
        placed = [one._replace(slot=one.slot + first) for one in pieces]
        take(free, job, placed)
        grams += truth.outcome(job, placed).grams
    return grams


if __name__ == "__main__":
    main()
