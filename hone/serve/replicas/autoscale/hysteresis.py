"""Autoscaler: one step up or down, with a band in between in which nothing changes."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from hone.serve.replicas.autoscale.policy import Autoscaler, Load, changed_within, covers, last


class Hysteresis(Autoscaler):
    """Add `step` replicas above `high` requests a replica, remove them when the rest would still have fewer than `low`.

    Between the two nothing changes (a Schmitt trigger): removing asks what the remaining ones would have, so that a removal never
    calls for its own reversal.
    """

    high: float = Field(8.0, gt=0, description="Mean requests a replica above which more are started.")
    low: float = Field(4.0, ge=0, description="Mean requests that the remaining replicas may have after a removal.")
    step: int = Field(1, ge=1, description="Replicas added or removed at once.")
    look_back_s: float = Field(15.0, gt=0, description="Seconds over which requests are averaged.")
    cool_down_s: float = Field(30.0, ge=0, description="Seconds after a change in which none is removed.")

    @model_validator(mode="after")
    def _apart(self) -> Hysteresis:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}: there is no band in which nothing changes")
        return self

    @property
    def window_s(self) -> float:
        return max(self.look_back_s, self.cool_down_s)

    def wanted(self, seen: Sequence[Load]) -> float:
        count, recent = seen[-1].replicas, last(seen, self.look_back_s)
        mean = sum(one.ongoing for one in recent) / len(recent)
        if mean / count > self.high and not changed_within(seen, self.look_back_s):
            return count + self.step
        left = count - self.step
        if left < 1 or changed_within(seen, self.cool_down_s) or not covers(seen, self.look_back_s):
            return count
        return left if mean / left < self.low else count
