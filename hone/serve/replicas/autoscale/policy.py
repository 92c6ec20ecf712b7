"""The slot `autoscaler`: a pure function of what was seen so far, which says how many replicas there should be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.table import Technique


@dataclass(frozen=True, slots=True)
class Load:
    """What is seen of a service at one moment."""

    time_s: float
    replicas: int
    """Replicas that are wanted by now: those that are ready and those that are starting."""
    ready: int
    ongoing: int
    """Requests that have come and are not done, waiting ones included."""
    arrivals: int = 0
    """Requests that came since the last moment."""


class Autoscaler(Technique):
    """Base of the slot. `wanted` is a pure function of the moments seen in the last `window_s` seconds, the newest last."""

    min_replicas: int = Field(1, ge=1, description="Least replicas.")
    max_replicas: int = Field(64, ge=1, le=64, description="Most replicas.")

    @model_validator(mode="after")
    def _range(self) -> Autoscaler:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self

    @property
    def window_s(self) -> float:
        """Seconds of the past that the policy looks at."""
        raise NotImplementedError

    def wanted(self, seen: Sequence[Load]) -> float:
        """How many replicas there should be; `desired` brings it into the range."""
        raise NotImplementedError

    def desired(self, seen: Sequence[Load]) -> int:
        """Replicas that should be there now, from min_replicas to max_replicas. Raises SpecError without a moment."""
        if not seen:
            raise SpecError("an autoscaler decides by what it has seen, and it has seen nothing", fix="give it a Load")
        if seen[-1].replicas == 0:  # all have ended
            return self.min_replicas
        return max(self.min_replicas, min(self.max_replicas, round(self.wanted(seen))))


class Seen:
    """The moments that a policy looks at: older ones are forgotten."""

    def __init__(self, policy: Autoscaler) -> None:
        self._policy = policy
        self._loads: deque[Load] = deque()

    def decide(self, load: Load) -> int:
        """The replicas that there should be, with `load` the newest moment."""
        loads = self._loads
        loads.append(load)
        # One moment before the window is kept: it says what was true at the window's start.
        while len(loads) > 2 and loads[1].time_s <= load.time_s - self._policy.window_s:
            loads.popleft()
        return self._policy.desired(tuple(loads))


def last(seen: Sequence[Load], seconds: float, now: float | None = None) -> list[Load]:
    """The moments of the last `seconds` before `now` (None: the newest moment)."""
    now = seen[-1].time_s if now is None else now
    return [one for one in seen if now - seconds < one.time_s <= now]


def covers(seen: Sequence[Load], seconds: float) -> bool:
    """Whether the service was watched for so long."""
    return seen[-1].time_s - seen[0].time_s >= seconds


def changed_within(seen: Sequence[Load], seconds: float) -> bool:
    """Whether the number of wanted replicas changed in the last `seconds`."""
    recent = [one for one in seen if one.time_s >= seen[-1].time_s - seconds]
    return any(one.replicas != seen[-1].replicas for one in recent)
