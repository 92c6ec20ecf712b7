"""Autoscaler: concurrency over a long window, and over a short one when that asks for twice the replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from hone.serve.replicas.autoscale.policy import Autoscaler, Load, last


class PanicWindow(Autoscaler):
    """Average over `stable_s`; when `panic_s` alone asks for `panic_threshold` times the replicas, follow it and never go down. Knative.

    Replicas are ceil(mean requests / (target x utilization)). Panic ends when no moment of the last `stable_s` called for it.
    """

    target: float = Field(8.0, gt=0, description="Requests in progress that one replica takes.")
    utilization: float = Field(0.7, gt=0, le=1, description="Part of `target` that is aimed at.")
    stable_s: float = Field(60.0, gt=0, description="Seconds of the long window.")
    panic_s: float = Field(6.0, gt=0, description="Seconds of the short window.")
    panic_threshold: float = Field(
        2.0, gt=1, description="Factor over the ready replicas at which the short window decides."
    )
    max_down_rate: float = Field(2.0, gt=1, description="Factor by which one decision may lower the replicas.")

    @property
    def window_s(self) -> float:
        return self.stable_s + self.panic_s

    def wanted(self, seen: Sequence[Load]) -> float:
        now, count = seen[-1].time_s, seen[-1].replicas
        stable = self._for(last(seen, self.stable_s))
        panics = [one for one in last(seen, self.stable_s) if self._panics(seen, one)]
        if panics:
            return max(count, self._for(last(seen, self.panic_s, now)), stable)
        return max(stable, math.floor(count / self.max_down_rate))

    def _panics(self, seen: Sequence[Load], at: Load) -> bool:
        return self._for(last(seen, self.panic_s, at.time_s)) >= self.panic_threshold * max(at.ready, 1)

    def _for(self, loads: Sequence[Load]) -> int:
        """Replicas for the mean of these moments."""
        mean = sum(one.ongoing for one in loads) / len(loads) if loads else 0.0
        return math.ceil(round(mean / (self.target * self.utilization), 9))
