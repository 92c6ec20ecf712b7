"""Autoscaler: so many replicas that each has a target number of requests, with separate delays up and down."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from hone.serve.replicas.autoscale.policy import Autoscaler, Load, covers


class TargetTracking(Autoscaler):
    """Track `target` requests a replica: ceil(n (1 + (requests per replica / target - 1) factor)), as Ray Serve does.

    Requests are averaged over `look_back_s`. More replicas are started when every moment of `up_delay_s` asked for more, fewer
    are kept when every moment of `down_delay_s` asked for fewer (Ray Serve's defaults: target 2, 30 s, 30 s, 600 s).
    """

    target: float = Field(2.0, gt=0, description="Requests in progress that each replica should have.")
    factor: float = Field(1.0, gt=0, description="Part of the error that one decision corrects.")
    look_back_s: float = Field(30.0, gt=0, description="Seconds over which requests are averaged.")
    up_delay_s: float = Field(30.0, ge=0, description="Seconds for which more must be asked for.")
    down_delay_s: float = Field(600.0, ge=0, description="Seconds for which fewer must be asked for.")

    @property
    def window_s(self) -> float:
        return self.look_back_s + max(self.up_delay_s, self.down_delay_s)

    def wanted(self, seen: Sequence[Load]) -> float:
        count = seen[-1].replicas
        asked = self._asked(seen, count)
        for delay, beyond in ((self.up_delay_s, asked[-1] > count), (self.down_delay_s, asked[-1] < count)):
            if not beyond or not covers(seen, delay):
                continue
            recent = [wish for one, wish in zip(seen, asked, strict=True) if one.time_s >= seen[-1].time_s - delay]
            if all((wish > count) == (asked[-1] > count) and wish != count for wish in recent):
                return asked[-1]
        return count

    def _asked(self, seen: Sequence[Load], count: int) -> list[int]:
        """What each moment asked for, were there `count` replicas: requests averaged over the look-back before it."""
        asked, first, total = [], 0, 0.0
        for place, one in enumerate(seen):
            total += one.ongoing
            while seen[first].time_s <= one.time_s - self.look_back_s:
                total -= seen[first].ongoing
                first += 1
            error = total / (place - first + 1) / count / self.target
            asked.append(max(1, math.ceil(round(count * (1 + (error - 1) * self.factor), 9))))
        return asked
