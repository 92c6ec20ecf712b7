"""The carbon intensity of a site's electricity over time, in steps of equal length, with what it means and where it is from."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np

from hone.base.errors import SpecError, did_you_mean

Signal = Literal["average", "marginal"]
SHIPPED = ("DE", "GB", "FR")
"""Sites with a year of half hours (2020) in the package."""
_FILE = Path(__file__).parent / "traces" / "europe_2020.csv"
_SOURCE = "dos-group/lets-wait-awhile (arXiv:2110.13234) from ENTSO-E generation of 2020 with IPCC life-cycle factors, half hours"


@dataclass(frozen=True)
class Intensity:
    """g CO2e/kWh of `site` from `start` on, a value for each `step_s` seconds.

    `signal` is "average" (the whole mix: what an inventory counts) or "marginal" (what the next kWh causes); `basis` says
    whether factors are of the life cycle or of combustion alone ("direct").
    """

    site: str
    start: datetime
    step_s: float
    values: np.ndarray
    signal: Signal
    source: str
    basis: str = "unknown"

    @property
    def end(self) -> datetime:
        """The end of the last step."""
        return self.start + timedelta(seconds=self.step_s * len(self.values))

    def over(self, start: datetime, step_s: float, steps: int) -> np.ndarray:
        """Means [steps] of the intensity over steps of `step_s` seconds from `start` on. SpecError: the trace ends before, or begins later."""
        last = start + timedelta(seconds=step_s * steps)
        if start < self.start or last > self.end:
            raise SpecError(
                f"{self.site}: intensities from {start:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} are asked for, and the trace has "
                f"{self.start:%Y-%m-%d %H:%M} to {self.end:%Y-%m-%d %H:%M} ({self.source})",
                fix="choose times that the trace covers, or give a trace that covers these",
            )
        edges = (start - self.start).total_seconds() / self.step_s + np.arange(steps + 1) * step_s / self.step_s
        grams = np.interp(edges, np.arange(len(self.values) + 1), np.concatenate([[0.0], np.cumsum(self.values)]))
        return np.diff(grams) * self.step_s / step_s

    def mean(self) -> float:
        """The mean of all steps, g CO2e/kWh."""
        return float(self.values.mean())


def same_signal(traces: Sequence[Intensity]) -> Signal:
    """The signal of all `traces`. SpecError: some are averages and others marginal, which cannot be compared or added."""
    first = traces[0]
    for other in traces[1:]:
        if other.signal != first.signal:
            raise SpecError(
                f"{first.site} has {first.signal} intensities ({first.source}) and {other.site} {other.signal} ones ({other.source})",
                fix="give traces of one signal for all sites: grams of an average kWh and of the next kWh answer different questions",
            )
    return first.signal


@functools.cache
def shipped(site: str) -> Intensity:
    """The intensities of 2020 of a site in `SHIPPED`, in half hours. SpecError for another site."""
    if site not in SHIPPED:
        raise SpecError(
            f"no carbon intensities of '{site}' are in the package",
            fix=f"{did_you_mean(site, SHIPPED)}there are {', '.join(SHIPPED)} (2020); for others give a file of intensities",
        )
    rows = np.loadtxt(_FILE, delimiter=",", comments="#", skiprows=4)
    return Intensity(
        site, datetime(2020, 1, 1, tzinfo=UTC), 1800.0, rows[:, SHIPPED.index(site)], "average", _SOURCE, "lifecycle"
    )


def forecast(truth: Intensity, now: datetime, how: str) -> Intensity:
    """What one expects at `now` of the steps after it, by a rule that uses no later step.

    `perfect`: the truth. `yesterday`, `last_week`: the value one period earlier, and of the last period again for later
    ones. `noise:0.1`: the truth with normal errors of 10 % of the trace's mean, alike in every run (for studies of how
    good a forecast must be; Wiesner et al. use 5 %). SpecError: another rule, or no whole period before `now`.
    """
    if how == "perfect":
        return truth
    name, _, amount = how.partition(":")
    values = truth.values.copy()
    known = int((now - truth.start).total_seconds() // truth.step_s)
    if name == "noise" and _is_share(amount):
        seed = int.from_bytes(hashlib.sha256(truth.site.encode()).digest()[:4], "big")
        errors = np.random.default_rng(seed).normal(0.0, float(amount) * truth.mean(), len(values))
        values[known:] = np.maximum(values + errors, 0.0)[known:]
    elif name in ("yesterday", "last_week") and not amount:
        period = round((86400 if name == "yesterday" else 7 * 86400) / truth.step_s)
        if known < period:
            raise SpecError(
                f"forecast: {how} needs intensities of {period * truth.step_s / 3600:g} hours before {now:%Y-%m-%d %H:%M}, and the trace "
                f"of {truth.site} begins at {truth.start:%Y-%m-%d %H:%M}",
                fix="start later, or take forecast: perfect",
            )
        later = np.arange(len(values) - known)
        values[known:] = values[known - period + later % period]
    else:
        raise SpecError(
            f"no forecast '{how}'", fix="perfect, yesterday, last_week, noise:0.05, or a file of a forecast"
        )
    return Intensity(
        truth.site, truth.start, truth.step_s, values, truth.signal, f"{how} of {truth.source}", truth.basis
    )


def _is_share(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and float(text) < 1
