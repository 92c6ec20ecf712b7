"""Replicas of an engine in a simulation, and the router in front of them: requests in, every one served by one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.replica import EngineSizes, Served, SimulatedReplica
from hone.plan.simulate.steps import StepTimes
from hone.serve.replicas.router import Router

State = Literal["starting", "ready", "draining", "stopped"]
Migration = Literal["none", "waiting", "all"]


@dataclass
class Member:
    """One replica of the fleet, and its life."""

    replica: SimulatedReplica
    state: State
    begun_s: float
    ended_s: float | None = None
    wakes: int = 0
    """Number of the wake-up that counts: earlier ones were replaced."""
    waits: bool = True
    """Whether its thread waits for a request."""

    def alive_s(self, now: float) -> float:
        """Seconds from its start to its end, or to `now`."""
        return (now if self.ended_s is None else self.ended_s) - self.begun_s


class Fleet:
    """Up to `most` replicas of one engine. With several, the server's own router chooses by prefix and load.

    `on_token` is told of first and last tokens, and `arrived` is, as by `SimulatedReplica`.
    """

    def __init__(
        self,
        loop: EventLoop,
        sizes: EngineSizes,
        steps: StepTimes,
        on_token: Callable[[Served, float], None],
        *,
        most: int = 1,
        abs_threshold: int = 32,
        rel_threshold: float = 1.5,
        arrived: bool = False,
    ) -> None:
        self.loop, self.sizes, self.most = loop, sizes, most
        self.members: list[Member] = []
        """All there ever were; a stopped one's place is taken by a later one."""
        self.held: deque[tuple[Served, list[int]]] = deque()
        """Requests that came while no replica was ready."""
        self._places: list[Member | None] = [None] * most
        self._steps, self._on_token, self._arrived = steps, on_token, arrived
        self._tokens: dict[int, list[int]] = {}
        self._router = Router(
            most,
            self._load,
            block_size=sizes.block_size,
            max_keys=sizes.num_pages * most,
            abs_threshold=abs_threshold,
            rel_threshold=rel_threshold,
        )
        for place in range(most):
            self._router.retire(place)

    def _load(self, place: int) -> int:
        member = self._places[place]
        return 0 if member is None else member.replica.outstanding

    def of(self, *states: State) -> list[Member]:
        """The members in one of these states, by place."""
        return [one for one in self._places if one is not None and one.state in states]

    @property
    def outstanding(self) -> int:
        """Requests that have come and are not done."""
        return len(self.held) + sum(one.replica.outstanding for one in self._places if one is not None)

    def start(self, start_s: float = 0.0) -> Member:
        """Starts a replica, ready after `start_s`."""
        place = self._places.index(None)
        replica = SimulatedReplica(
            self.sizes, self._steps, self.loop.clock, self._on_token, place, arrived=self._arrived
        )
        member = Member(replica, "starting", self.loop.now)
        self._places[place] = member
        self.members.append(member)
        if start_s > 0:
            self.loop.at(self.loop.now + start_s, partial(self._ready, member))
        else:
            self._ready(member)
        return member

    def _ready(self, member: Member) -> None:
        if member.state != "starting":
            return  # it was stopped before
        self.resume(member)
        while self.held:
            self._give(*self.held.popleft())
        self._relieve(member)

    def _relieve(self, member: Member) -> None:
        """A new replica takes what it can run at once of the requests that wait at the others, the newest of each queue first."""
        room = self.sizes.max_num_seqs - member.replica.outstanding
        for other in self.of("ready"):
            if other is not member:
                taken = other.replica.take_newest(room)
                room -= len(taken)
                for served in reversed(taken):
                    self._add(member, served, self._tokens[served.number])

    def resume(self, member: Member) -> None:
        """Gives requests to a replica that was starting or draining."""
        member.state = "ready"
        self._router.admit(member.replica.index)

    def drain(self, member: Member, migration: Migration = "none") -> None:
        """Gives a replica no request any more; it stops when the last one is done. One that is starting stops at once.

        migration: `waiting` requests move to other replicas at once, or `all`: those that run are computed again there.
        """
        begun, member.state = member.state, "draining"
        self._router.retire(member.replica.index)
        others = bool(self.of("ready"))
        if begun == "ready" and migration != "none" and others:
            for served in member.replica.take(all_of_them=migration == "all"):
                self.submit(served, self._tokens[served.number])
        self._stop_if_empty(member)

    def kill(self, member: Member) -> None:
        """Ends a replica at once; what it had is computed again elsewhere, from the prompt and the tokens that were answered."""
        self._router.retire(member.replica.index)
        left = member.replica.take(all_of_them=True)
        self._stop(member)
        for served in left:
            self.submit(served, self._tokens[served.number])

    def submit(self, served: Served, tokens: list[int]) -> None:
        """Gives a request to a replica, or holds it until one is ready."""
        self._tokens[served.number] = tokens
        if self.of("ready"):
            self._give(served, tokens)
        else:
            self.held.append((served, tokens))

    def finished(self, served: Served) -> None:
        """To be called when a request is done."""
        self._tokens.pop(served.number, None)

    def _give(self, served: Served, tokens: list[int]) -> None:
        ready = self.of("ready")
        member = ready[0] if len(ready) == 1 else self._places[self._router.place(tokens)[0]]
        assert member is not None, "the router knows those that are ready"
        self._add(member, served, tokens)

    def _add(self, member: Member, served: Served, tokens: list[int]) -> None:
        member.replica.add(served, tokens)
        if member.waits:
            self._wake(member, member.wakes)

    def _wake(self, member: Member, number: int) -> None:
        """Lets a replica's thread do what it can now, and has it called again when it has waited."""
        if number != member.wakes or member.state == "stopped":
            return
        member.wakes += 1
        until = member.replica.step()
        # One that waits to fill a batch may be called by a request before.
        member.waits = until is None or not member.replica.computes
        if until is not None:
            self.loop.at(until, partial(self._wake, member, member.wakes))
        self._stop_if_empty(member)

    def _stop_if_empty(self, member: Member) -> None:
        if member.state == "draining" and not member.replica.outstanding:
            self._stop(member)

    def _stop(self, member: Member) -> None:
        member.state, member.ended_s = "stopped", self.loop.now
        self._places[member.replica.index] = None
