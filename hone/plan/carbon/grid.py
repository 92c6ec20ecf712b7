"""Sites and hours as matrices: grams and prices of a kWh in every slot, and what a placed job emits, costs and takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from hone.base.errors import SpecError
from hone.cost.carbon.intensity import SHIPPED, Intensity, forecast, same_signal, shipped
from hone.cost.carbon.readers import read_intensity
from hone.plan.carbon.jobs import Job, Schedule, Site
from hone.plan.carbon.slots import Piece, Slots

_FOLDER_FIX = "give a site of the package ({}) or a file of intensities"


@dataclass(frozen=True)
class Outcome:
    """What a placed job emits, costs and takes. `finish` is its end, `added_h` how much later than without waiting."""

    grams: float
    usd: float
    kwh: float
    finish: datetime
    added_h: float
    moves: int
    pauses: int


@dataclass(frozen=True)
class Grid:
    """The slots of a schedule. `grams` and `usd_kwh` [sites, slots] are of a kWh of devices, with the building's share in."""

    spec: Schedule
    grams: np.ndarray
    usd_kwh: np.ndarray
    signal: str
    sources: tuple[str, ...]

    @property
    def step_h(self) -> float:
        """Hours of a slot."""
        return self.spec.step_minutes / 60

    @property
    def num_slots(self) -> int:
        """Slots from the start to the last deadline."""
        return self.grams.shape[1]

    def at(self, slot: float) -> datetime:
        """The time at which a slot begins."""
        return self.spec.start + timedelta(hours=slot * self.step_h)

    def span(self, job: Job) -> tuple[int, int]:
        """The first slot of `job` and the one after its last. Work starts at the first whole slot after its arrival."""
        begin, step = self.spec.start, timedelta(hours=self.step_h)
        first = 0 if job.arrival is None else max(0, -((begin - job.arrival) // step))
        return int(first), int((job.deadline - begin) // step)

    def sites(self, job: Job) -> list[int]:
        """Places of the job's sites, its usual one first."""
        names = [site.name for site in self.spec.sites]
        return [names.index(name) for name in job.sites] if job.sites else [*range(len(names))]

    def slots(self, job: Job, free: np.ndarray, begin: int = 0, end: int | None = None) -> Slots:
        """What `job` may use of the slots `begin` to `end`, where `free` [sites, all slots] are devices that are left.

        SpecError: a restart or a move outlasts a slot.
        """
        first, last = self.span(job)
        end = self.num_slots if end is None else end
        weight, price = self._weights()
        mixed = weight * self.grams[:, begin:end] + price * self.usd_kwh[:, begin:end]
        rent = price * job.devices * np.array([site.usd_per_device_hour for site in self.spec.sites])[:, None]
        allowed = np.zeros(mixed.shape, bool)
        allowed[self.sites(job), max(0, first - begin) : max(0, last - begin)] = True
        cost = np.where(allowed & (free[:, begin:end] >= job.devices), job.kw * mixed + rent, np.inf)
        restart_h = job.restart_minutes / 60
        if job.mode != "interruptible":
            return Slots(cost, self.step_h)
        self._fits_a_slot(job, restart_h, "a restart of")
        if job.checkpoint is None:
            return Slots(cost, self.step_h, restart_h)
        move_h = restart_h + job.checkpoint_bytes * 8 / (self.spec.link_gbit_s * 1e9) / 3600
        self._fits_a_slot(job, move_h, "a move of")
        unit = self.move_kwh(job) * mixed
        return Slots(cost, self.step_h, restart_h, move_h, (unit[:, None] + unit[None]) / 2)

    def _fits_a_slot(self, job: Job, hours: float, what: str) -> None:
        if hours >= self.step_h:
            raise SpecError(
                f"job {job.name}: {what} {hours * 60:.0f} minutes is no shorter than a slot of {self.spec.step_minutes:g}",
                fix="raise step_minutes or link_gbit_s, or leave out the job's checkpoint (it stays at one site) or restart_minutes",
            )

    def move_kwh(self, job: Job) -> float:
        """Energy of the network for one move."""
        return job.checkpoint_bytes / 1e9 * self.spec.kwh_per_gb

    def _weights(self) -> tuple[float, float]:
        """What a gram and a dollar count."""
        if self.spec.usd_per_tonne is None:
            return 1.0, 0.0
        return self.spec.usd_per_tonne / 1e6, 1.0

    def outcome(self, job: Job, pieces: Sequence[Piece]) -> Outcome:
        """What `pieces` of `job` emit, cost and take with this grid's intensities."""
        grams = usd = kwh = 0.0
        moves = pauses = 0
        for before, one in zip([None, *pieces], pieces):
            hours = (one.hours + one.lost) * one.workers
            energy = job.kw * hours
            rate = self.spec.sites[one.site].usd_per_device_hour
            grams += energy * self.grams[one.site, one.slot]
            usd += energy * self.usd_kwh[one.site, one.slot] + rate * job.devices * hours
            kwh += energy
            if one.moved_from is not None:
                moved, moves = self.move_kwh(job), moves + 1
                pair = [one.moved_from, one.site]
                grams += moved * float(self.grams[pair, one.slot].mean())
                usd += moved * float(self.usd_kwh[pair, one.slot].mean())
                kwh += moved
            pauses += before is not None and one.slot > before.slot + 1
        spans = spans_of(pieces, self.step_h)
        finish = self.spec.start + timedelta(hours=spans[-1][1])
        earliest = max(self.spec.start, job.arrival or self.spec.start) + timedelta(hours=job.hours)
        return Outcome(
            float(grams), float(usd), float(kwh), finish, (finish - earliest).total_seconds() / 3600, moves, pauses
        )


def spans_of(pieces: Sequence[Piece], step_h: float) -> list[tuple[float, float, int, int]]:
    """(start h, end h, site, workers) of runs without a break. A slot that is used in part lies where it touches its neighbours."""
    spans: list[tuple[float, float, int, int]] = []
    for place, one in enumerate(pieces):
        used, begin = one.hours + one.lost, one.slot * step_h
        same = place > 0 and pieces[place - 1].slot == one.slot
        ahead = (
            place + 1 < len(pieces) and pieces[place + 1].slot == one.slot + 1 and pieces[place + 1].site == one.site
        )
        behind = place > 0 and pieces[place - 1].slot == one.slot - 1 and pieces[place - 1].site == one.site
        if same:
            begin = spans[-1][1]
        elif ahead and not behind and used < step_h - 1e-9 and pieces[place + 1].workers == one.workers:
            begin += step_h - used
        last = spans[-1] if spans else None
        if last and abs(last[1] - begin) < 1e-9 and last[2:] == (one.site, one.workers):
            spans[-1] = (last[0], begin + used, one.site, one.workers)
        else:
            spans.append((begin, begin + used, one.site, one.workers))
    return spans


def grids(spec: Schedule, folder: Path = Path()) -> tuple[Grid, Grid]:
    """The grid as forecast and the true one. Paths of files are relative to `folder`. SpecError: a site without intensities, or signals mixed."""
    last = max(job.deadline for job in spec.jobs)
    steps = int((last - spec.start).total_seconds() // (spec.step_minutes * 60))
    if steps < 1:
        raise SpecError(
            f"the last deadline, {last:%Y-%m-%d %H:%M}, is less than a slot after the start, {spec.start:%Y-%m-%d %H:%M}",
            fix="give deadlines after `start`",
        )
    truths = [_trace(site.intensity or site.name, site, folder) for site in spec.sites]
    expected = [
        read_intensity(folder / site.forecast, site.name)
        if site.forecast
        else forecast(truth, spec.start, spec.forecast)
        for site, truth in zip(spec.sites, truths)
    ]
    signal = same_signal([*truths, *expected])
    pue = np.array([site.pue for site in spec.sites])[:, None]
    usd = np.array([site.usd_per_kwh for site in spec.sites])[:, None] * pue + np.zeros((1, steps))
    made = []
    for traces in (expected, truths):
        grams = np.array([one.over(spec.start, spec.step_minutes * 60, steps) for one in traces]) * pue
        made.append(Grid(spec, grams, usd, signal, tuple(one.source for one in traces)))
    return made[0], made[1]


def _trace(name: str, site: Site, folder: Path) -> Intensity:
    if name in SHIPPED:
        return shipped(name)
    if (folder / name).exists() and name:
        return read_intensity(folder / name, site.name)
    raise SpecError(
        f"site {site.name}: intensity '{name}' is neither a site of the package nor a file",
        fix=_FOLDER_FIX.format(", ".join(SHIPPED)),
    )
