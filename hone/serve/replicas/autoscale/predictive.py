"""Autoscaler: a forecast of the rate of requests, and the rate that one replica serves in time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pydantic import Field

from hone.serve.replicas.autoscale.policy import Autoscaler, Load, covers


class Predictive(Autoscaler):
    """Start what the rate in `horizon_s` will need: level and trend by Holt's linear smoothing, over one replica's goodput.

    `rate_per_replica` is the goodput of one replica (`hone simulate --goodput`). The horizon should be the time that a replica
    takes to start. Requests that wait already are served within the horizon as well. Fewer replicas are kept only when the
    forecast asked for fewer during `down_delay_s`. Holt 1957 (reprinted 2004, doi:10.1016/j.ijforecast.2003.09.015).
    """

    rate_per_replica: float = Field(1.0, gt=0, description="Requests/s that one replica serves in time: its goodput.")
    horizon_s: float = Field(120.0, gt=0, description="Seconds ahead that are forecast: those of a replica's start.")
    bin_s: float = Field(15.0, gt=0, description="Seconds over which arrivals are counted.")
    level: float = Field(0.5, gt=0, le=1, description="Weight of the newest rate in the level.")
    trend: float = Field(0.2, ge=0, le=1, description="Weight of the newest change in the trend.")
    margin: float = Field(0.1, ge=0, description="Part by which the forecast is raised.")
    in_time: float = Field(
        8.0, gt=0, description="Requests in progress that a replica answers in time; more are a backlog."
    )
    down_delay_s: float = Field(120.0, ge=0, description="Seconds for which fewer must have been enough.")

    @property
    def window_s(self) -> float:
        return max(20 * self.bin_s, self.down_delay_s + 4 * self.bin_s)

    def wanted(self, seen: Sequence[Load]) -> float:
        count = seen[-1].replicas
        asked = self._asked(seen)
        if asked >= count or not covers(seen, self.down_delay_s):
            return max(asked, count)
        ends = (seen[-1].time_s - share * self.down_delay_s for share in (0.25, 0.5, 0.75, 1.0))
        earlier = [self._asked([one for one in seen if one.time_s <= end] or seen[:1]) for end in ends]
        return min(count, max(asked, *earlier))

    def _asked(self, seen: Sequence[Load]) -> int:
        """Replicas for the forecast from these moments alone."""
        late = max(0.0, seen[-1].ongoing - self.in_time * seen[-1].ready) / self.horizon_s
        rate = (self.forecast(seen) + late) * (1 + self.margin)
        return math.ceil(round(rate / self.rate_per_replica, 9))

    def forecast(self, seen: Sequence[Load]) -> float:
        """Requests/s in `horizon_s`, from the arrivals of whole bins before the newest moment; not below 0."""
        end, bins = seen[-1].time_s, {}
        for before, one in itertools.pairwise(seen):
            place = int((end - one.time_s) / self.bin_s)
            count, span = bins.get(place, (0, 0.0))
            bins[place] = count + one.arrivals, span + one.time_s - before.time_s
        rates = [count / span for _, (count, span) in sorted(bins.items(), reverse=True) if span > self.bin_s / 2]
        if not rates:
            return 0.0
        level, slope = rates[0], 0.0
        for rate in rates[1:]:
            before = level
            level = self.level * rate + (1 - self.level) * (level + slope)
            slope = self.trend * (level - before) + (1 - self.trend) * slope
        return max(0.0, level + slope * self.horizon_s / self.bin_s)
