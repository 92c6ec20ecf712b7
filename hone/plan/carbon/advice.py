"""Advice: changes that were planned again, each with what its own plan saves; nothing is said that was not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hone.base.errors import HoneError
from hone.plan.carbon.jobs import Job, Schedule
from hone.plan.carbon.schedule import Planned, grams, outcomes, plan


@dataclass(frozen=True)
class Advice:
    """A change and what its plan comes to. `value` is None where the changed plan is impossible; `evidence` says how it was got."""

    change: str
    value: float | None
    saved: float | None
    evidence: str


def advise(now: float, changes: Mapping[str, Callable[[], tuple[float, str]]]) -> list[Advice]:
    """What each of `changes` saves of `now`, most first; those that cannot be planned come last, with their error.

    A change is a name and a function that plans again and returns (value in the unit of `now`, evidence): another hour or
    site here, and likewise another clock, batch or dtype by whoever plans those.
    """
    found = []
    for name, again in changes.items():
        try:
            value, evidence = again()
            found.append(Advice(name, value, 1 - value / now, evidence))
        except HoneError as error:
            found.append(Advice(name, None, None, error.what))
    return sorted(found, key=lambda one: (one.saved is None, -(one.saved or 0.0)))


def of_schedule(spec: Schedule, folder: Path = Path(), made: Planned | None = None) -> list[Advice]:
    """Changes of hours and sites: deadlines a day later, jobs that may stop, every site for every job, more devices, a forecast that is right.

    `made` is the plan of `spec` where it is there already. Each change is placed once: what foresight would do with it is not asked.
    """
    made = made or plan(spec, folder)
    changes: dict[str, Schedule] = {
        "deadlines a day later": _jobs(spec, lambda job: {"deadline": job.deadline + timedelta(days=1)})
    }
    if any(job.mode == "whole" for job in spec.jobs):
        changes["jobs of mode whole may stop and resume"] = _jobs(
            spec, lambda job: {"mode": "interruptible" if job.mode == "whole" else job.mode}
        )
    if any(job.sites and len(job.sites) < len(spec.sites) for job in spec.jobs):
        changes["every job at every site"] = _jobs(spec, lambda job: {"sites": ()})
    if any(site.devices is not None for site in spec.sites):
        free = tuple(site.model_copy(update={"devices": None}) for site in spec.sites)
        changes["sites with devices for all jobs at once"] = spec.model_copy(update={"sites": free})
    if spec.forecast != "perfect" or any(site.forecast for site in spec.sites):
        changes["a forecast that is right"] = spec

    def again(changed: Schedule) -> Callable[[], tuple[float, str]]:
        def run() -> tuple[float, str]:
            true = made.foresight if changed is spec else outcomes(changed, folder)
            added = sum(one.added_h for one in true.values())
            return grams(true), f"planned again: {grams(true):,.0f} g, {added:,.1f} h of waiting"

        return run

    return advise(grams(made.true), {name: again(changed) for name, changed in changes.items()})


def _jobs(spec: Schedule, change: Callable[[Job], dict[str, Any]]) -> Schedule:
    return spec.model_copy(update={"jobs": tuple(job.model_copy(update=change(job)) for job in spec.jobs)})
