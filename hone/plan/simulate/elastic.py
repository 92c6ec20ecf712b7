"""A fleet that grows and shrinks in a simulation: an autoscaler's decisions, cold starts, a warm pool, draining, migration."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.base.figure import Figure
from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.fleet import Fleet, Member, Migration
from hone.plan.simulate.replica import Served
from hone.serve.replicas.autoscale.policy import Autoscaler, Load, Seen


@dataclass(frozen=True)
class Elasticity:
    """How a fleet changes its size. Times are seconds."""

    policy: Autoscaler
    interval_s: float = 5.0
    """Between two decisions."""
    start_s: float = 120.0
    """From a decision to a replica that is ready: a machine, its image, the weights, the first step."""
    warm: int = 0
    """Replicas that are loaded and wait, and that are paid for all the time."""
    warm_start_s: float = 5.0
    """From a decision to a replica of the warm pool that is ready."""
    migration: Migration = "none"
    """What a draining replica hands to others."""


@dataclass
class Scaling:
    """Follows a policy in a simulation: `begin` and `came` are to be a `Conduct`'s."""

    how: Elasticity
    moments: list[Load] = field(default_factory=list)
    """What was seen at every decision."""
    started: int = 0
    drained: int = 0

    def __post_init__(self) -> None:
        self._seen = Seen(self.how.policy)
        self._warm_at = [0.0] * self.how.warm  # when each place of the pool has a loaded replica
        self._arrivals = 0

    @property
    def most(self) -> int:
        """Places for replicas: those that drain have one, too."""
        return 2 * self.how.policy.max_replicas

    def came(self, served: Served) -> None:
        """A request has come."""
        self._arrivals += 1

    def begin(self, loop: EventLoop, fleet: Fleet) -> None:
        """Decides now, and after every interval."""
        wanted = fleet.of("ready", "starting")
        load = Load(loop.now, len(wanted), len(fleet.of("ready")), fleet.outstanding, self._arrivals)
        self._arrivals = 0
        self.moments.append(load)
        more = self._seen.decide(load) - len(wanted)
        for _ in range(more):
            self._grow(loop, fleet)
        for member in self._least_useful(wanted)[: max(0, -more)]:
            self.drained += 1
            fleet.drain(member, self.how.migration)
        loop.at(loop.now + self.how.interval_s, lambda: self.begin(loop, fleet))

    def _grow(self, loop: EventLoop, fleet: Fleet) -> None:
        """One replica more: one that drains goes on at once, else one of the warm pool, else a cold start."""
        draining = fleet.of("draining")
        if draining:
            fleet.resume(max(draining, key=lambda one: one.replica.outstanding))
            return
        if len(fleet.of("ready", "starting", "draining")) == fleet.most:
            return
        self.started += 1
        ready = min(self._warm_at, default=float("inf"))
        if ready <= loop.now:
            # Its place in the pool is filled again by a cold start.
            self._warm_at[self._warm_at.index(ready)] = loop.now + self.how.start_s
            fleet.start(self.how.warm_start_s)
        else:
            fleet.start(self.how.start_s)

    @staticmethod
    def _least_useful(members: list[Member]) -> list[Member]:
        """Those that start first, the latest of them, then those with the fewest requests."""
        return sorted(members, key=lambda one: (one.state == "ready", one.replica.outstanding, -one.begun_s))

    def figures(self, fleet: Fleet, end_s: float) -> list[Figure]:
        """What elasticity cost: replica-hours with the warm pool, starts, and the most replicas at once."""
        hours = (sum(one.alive_s(end_s) for one in fleet.members) + self.how.warm * end_s) / 3600
        most = max((one.replicas for one in self.moments), default=0)
        rows = (
            (
                "replica_hours",
                hours,
                "h",
                "from the decision to start a replica until it has drained, and the warm pool",
            ),
            ("replicas_started", self.started, "", ""),
            ("replicas_drained", self.drained, "", ""),
            ("most_replicas", most, "", ""),
        )
        return [
            Figure(name=name, value=value, unit=unit, how="modelled", note=note) for name, value, unit, note in rows
        ]
