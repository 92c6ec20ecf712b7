"""`hone cost money spot`: a job with a deadline on machines that may be taken away."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.money.spot import POLICIES, SpotTrace, follow, foresight_usd, made_trace, read_trace

PAPER = "Wu et al. 2024, Can't Be Late, NSDI"


class SpotMoney(Calculator):
    """Policies on one trace of spot machines: on demand alone, greedy, uniform progress, and perfect foresight."""

    work_h: float = Field(gt=0, description="Hours of work.")
    deadline_h: float = Field(gt=0, description="Hours until it must be done.")
    change_h: float = Field(
        0.1, ge=0, description="Hours until a new machine works: start, copies, loading the checkpoint."
    )
    usd_per_hour: float = Field(gt=0, description="Price of an hour on demand.")
    spot_usd_per_hour: float = Field(gt=0, description="Price of an hour of spot.")
    trace: str = Field(
        "", description="JSON file of availability, as in github.com/skypilot-org/spot-traces; empty: a made one."
    )
    needed: int = Field(1, ge=1, description="Machines that must be there at once.")
    availability: float | None = Field(None, gt=0, lt=1, description="Of a made trace: share of time with a machine.")
    mean_up_h: float | None = Field(
        None, gt=0, description="Of a made trace: mean hours until a machine is taken away."
    )
    seed: int = Field(0, description="Of a made trace.")

    @model_validator(mode="after")
    def _one_trace(self) -> Self:
        if not self.trace and (self.availability is None or self.mean_up_h is None):
            raise ValueError("give a trace, or availability and mean_up_h of a made one")
        return self

    def record(self) -> SpotTrace:
        """The trace."""
        if self.trace:
            return read_trace(Path(self.trace), self.needed)
        assert self.availability is not None and self.mean_up_h is not None
        return made_trace(self.availability, self.mean_up_h, self.deadline_h + 1, seed=self.seed)

    def sheet(self) -> Sheet:
        """The price of each policy, and what it saves against on demand alone. SpecError, FitError: as `follow`."""
        trace = self.record()
        found = Sheet(
            f"spot machines, trace {trace.source}: there {trace.availability:.0%} of the time, {trace.mean_up_h:.1f} h at once; simulated"
        )
        job = (self.work_h, self.deadline_h, self.change_h)
        for name, policy in POLICIES.items():
            spent = follow(policy, trace, *job)
            found.add(
                name, "s * spot + o * demand", "$", PAPER if name == "uniform progress" else "",
                s=spent.spot_h, spot=self.spot_usd_per_hour, o=spent.on_demand_h, demand=self.usd_per_hour,
            )  # fmt: skip
            found.verdicts.append(f"{name}: {spent.changes} machines started, done at {spent.end_h:.1f} h")
        known = foresight_usd(trace, *job, self.spot_usd_per_hour, self.usd_per_hour)
        found.verdicts.append(f"perfect foresight: ${known:,.2f}")
        demand = found["always on demand"]
        for name in ("greedy spot", "uniform progress"):
            found.add(f"{name} saves", "1 - usd / demand", "%", usd=found[name], demand=demand)
        found.add("perfect foresight saves", "1 - usd / demand", "%", usd=known, demand=demand)
        return found
