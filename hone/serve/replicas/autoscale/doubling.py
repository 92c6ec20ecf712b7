"""Autoscaler: twice as many replicas above one utilization, half as many below another."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from hone.serve.replicas.autoscale.policy import Autoscaler, Load, changed_within, covers, last


class Doubling(Autoscaler):
    """Double above `high` utilization and halve below `low`, from 4 to 64 replicas, with a look-back and a cool-down.

    Utilization is the requests in the system over what the replicas take together (`target` each). It must have been beyond the
    threshold for `after_s`, and nothing changes within `cool_down_s` of the last change: without both a number that is right at
    one moment is doubled and halved in turn.
    """

    min_replicas: int = Field(4, ge=1, description="Least replicas.")
    high: float = Field(0.8, gt=0, description="Utilization above which the replicas are doubled.")
    low: float = Field(0.3, ge=0, description="Utilization below which they are halved.")
    target: float = Field(8.0, gt=0, description="Requests in progress that fill one replica.")
    after_s: float = Field(15.0, ge=0, description="Seconds for which utilization must be beyond a threshold.")
    cool_down_s: float = Field(60.0, ge=0, description="Seconds after a change in which there is no other.")

    @model_validator(mode="after")
    def _apart(self) -> Doubling:
        if 2 * self.low > self.high:
            raise ValueError(
                f"half of the replicas are used twice as much: with low {self.low} and high {self.high} they would be doubled again"
            )
        return self

    @property
    def window_s(self) -> float:
        return max(self.after_s, self.cool_down_s)

    def wanted(self, seen: Sequence[Load]) -> float:
        count = seen[-1].replicas
        if changed_within(seen, self.cool_down_s) or not covers(seen, self.after_s):
            return count
        used = [one.ongoing / (self.target * max(one.replicas, 1)) for one in last(seen, self.after_s)] or [0.0]
        if min(used) > self.high:
            return 2 * count
        return count // 2 if max(used) < self.low else count
