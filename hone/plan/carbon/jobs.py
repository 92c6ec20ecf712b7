"""What is to be scheduled: jobs with their hours, power and deadlines, sites with their electricity, and how to choose."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError, did_you_mean
from hone.base.figure import byte_count
from hone.base.spec import Spec, read_yaml


def _utc(value: datetime | None) -> datetime | None:
    """`value` in UTC; without a zone it is UTC."""
    return value if value is None else (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)


class Site(Spec):
    """A place with devices and its own electricity."""

    name: str = Field(description="Name that jobs and windows use.")
    intensity: str = Field(
        "", description="Carbon intensities: a site of the package (DE, GB, FR), or a file; empty is `name`."
    )
    forecast: str = Field("", description="File of a forecast of them; empty takes the schedule's `forecast`.")
    usd_per_kwh: float = Field(0.0, ge=0, description="Price of electricity; 0 leaves it out of the prices.")
    usd_per_device_hour: float = Field(
        0.0, ge=0, description="Price of a device and hour; 0 leaves it out of the prices."
    )
    devices: int | None = Field(None, ge=1, description="Devices that all jobs share; empty: as many as they need.")
    pue: float = Field(
        1.0, ge=1, description="Power of the building over that of the devices; 1.0 counts the devices alone."
    )


class Job(Spec):
    """Work with a deadline."""

    name: str = Field(description="Name that the windows are written under.")
    hours: float = Field(gt=0, description="Hours of work, of an elastic job with one worker.")
    power_kw: float | None = Field(None, gt=0, description="Power while it works, kW, of an elastic job of one worker.")
    energy_kwh: float | None = Field(None, gt=0, description="Energy of all of its work, in place of power_kw.")
    mode: Literal["interruptible", "whole", "elastic"] = Field(
        "interruptible",
        description="Whether it may stop and resume, must run in one piece, or may also change its number of workers.",
    )
    arrival: datetime | None = Field(None, description="Earliest start; empty is the schedule's start.")
    deadline: datetime = Field(description="Latest end.")
    sites: tuple[str, ...] = Field((), description="Sites where it may run, the usual one first; empty: all.")
    devices: int = Field(1, ge=1, description="Devices that it takes, of an elastic job each worker.")
    checkpoint: str | None = Field(
        None, description="Size of what moves with it to another site (140GB); empty: it stays where it began."
    )
    restart_minutes: float = Field(
        0.0, ge=0, description="Minutes of its power that each resumption or move costs before work goes on."
    )
    speedups: tuple[float, ...] = Field(
        (1.0,), description="Throughput of an elastic job with 1, 2, ... workers over that with one."
    )

    @property
    def kw(self) -> float:
        """Power while it works, of an elastic job of one worker."""
        return self.power_kw if self.power_kw is not None else self.energy_kwh / self.hours  # type: ignore[operator]

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes that move with it."""
        return float(byte_count(self.checkpoint)) if self.checkpoint else 0.0

    @field_validator("arrival", "deadline")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return _utc(value)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.power_kw is None) == (self.energy_kwh is None):
            raise ValueError(f"job {self.name}: give power_kw or energy_kwh, one of the two")
        if self.checkpoint:
            byte_count(self.checkpoint)
        if self.speedups[0] != 1.0 or any(b <= a for a, b in pairwise(self.speedups)):
            raise ValueError(f"job {self.name}: speedups begin with 1.0 and rise")
        gains = [b - a for a, b in zip((0.0, *self.speedups), self.speedups)]
        if any(b > a + 1e-9 for a, b in pairwise(gains)):
            raise ValueError(
                f"job {self.name}: each further worker must add no more than the one before (speedups {self.speedups})"
            )
        if len(self.speedups) > 1 and self.mode != "elastic":
            raise ValueError(f"job {self.name}: speedups are of mode: elastic, and its mode is {self.mode}")
        if self.mode != "interruptible" and self.checkpoint:
            raise ValueError(
                f"job {self.name}: only an interruptible job moves, so `checkpoint` has no meaning for mode {self.mode}"
            )
        return self


class Schedule(Spec):
    """The file that `hone schedule` reads."""

    start: datetime = Field(description="Now: when the plan is made, and the first hour that it may use.")
    step_minutes: float = Field(60.0, gt=0, le=1440, description="Length of a slot.")
    forecast: str = Field(
        "perfect", description="What is known of later intensities: perfect, yesterday, last_week or noise:0.05."
    )
    method: Literal["groups", "list", "exact"] = Field(
        "groups",
        description="list: job after job, with rents for contested slots; groups: then small groups to their optimum by "
        "HiGHS; exact: all at once by HiGHS, as long as limit_s.",
    )
    usd_per_tonne: float | None = Field(
        None, ge=0, description="Price of a tonne of CO2e that is weighed against prices; empty: carbon alone counts."
    )
    link_gbit_s: float = Field(10.0, gt=0, description="Rate between sites.")
    kwh_per_gb: float = Field(
        0.06, ge=0, description="Energy of the network for a GB moved (Aslan et al. 2018: 0.06 in 2015, less since)."
    )
    limit_s: float = Field(60.0, gt=0, description="Longest search of the method exact.")
    sites: tuple[Site, ...] = Field(description="Where jobs may run.")
    jobs: tuple[Job, ...] = Field(description="What is to run.")

    @field_validator("start")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime | None:
        return _utc(value)

    @field_validator("sites", "jobs")
    @classmethod
    def _named_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [one.name for one in value]
        if not names:
            raise ValueError("give one or more")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"'{twice}' is there twice")
        return value

    @classmethod
    def load(cls, path: Path) -> Self:
        """The schedule of a YAML file. SpecError: another field, or a job that cannot be."""
        spec = cls.from_overrides({}, path)
        known = [site.name for site in spec.sites]
        for job in spec.jobs:
            if wrong := next((name for name in job.sites if name not in known), None):
                raise SpecError(
                    f"job {job.name} may run at '{wrong}', which is no site",
                    fix=f"{did_you_mean(wrong, known)}sites are {', '.join(known)}",
                )
        return spec


def windows_of(path: Path) -> list[dict[str, Any]]:
    """The windows of a file that `hone schedule --out` wrote. SpecError: it has none."""
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("windows"), list):
        raise SpecError(f"{path} has no `windows`", fix="write one with hone schedule JOBS.yaml --out=FOLDER")
    return values["windows"]
