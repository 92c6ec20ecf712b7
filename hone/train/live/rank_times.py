"""What each rank's share of a step takes without the waits for other ranks, and which rank the others wait for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.figure import human_seconds
from hone.base.ranks import Mesh


class Took(NamedTuple):
    """Seconds of every rank, in the order of the ranks, in one step."""

    step: int
    busy: list[float]
    """Reading its sequences, forward and backward passes."""
    wait: list[float]
    """Waiting in transfers and meetings, with what the transfers themselves take."""

    def row(self) -> dict[str, Any]:
        """As a line of timing.jsonl."""
        busy, wait = ([float(f"{one:.4g}") for one in times] for times in (self.busy, self.wait))
        return {"step": self.step, "busy_s": busy, "wait_s": wait}


class RankTimes:
    """The times of this rank's steps, which the next step's counts carry to the others; with one rank nothing is measured.

    A step calls `begins`, reads its sequences, `arrives` at the meeting about its counts, `passes` from there to its forward
    and backward passes, is `computed`, has `met` again, and calls `ends` when its numbers are known, after an update that did not
    wait for them: that is neither work of this kind nor a wait. On a GPU passes and waits are what lies between events of the
    stream; they are read in `ends`, when the step has waited for the device anyway, so nothing waits for these times.
    """

    def __init__(self, mesh: Mesh, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mesh, self._clock = mesh, clock
        self._measures, self._on_gpu = mesh.world_size > 1, device.type == "cuda"
        self._at: dict[str, Any] = {}
        self.own = (0.0, 0.0)
        """(busy, wait) of the last step; zeros before the first."""
        self.last: Took | None = None
        """Those of every rank, of the step before the last or, where ranks meet seldom, the last of which they know."""

    def begins(self) -> None:
        self._mark("begins")

    def arrives(self) -> None:
        self._mark("arrives")

    def passes(self) -> None:
        self._mark("passes", on_stream=True)
        if self._measures:
            self._mesh.waits.later()  # those of evaluations, checkpoints and updates

    def computed(self) -> None:
        self._mark("computed", on_stream=True)
        if self._measures:
            self._at["waited"] = self._mesh.waits.later()

    def met(self) -> None:
        self._mark("met", on_stream=True)

    def ends(self) -> None:
        if not self._measures:
            return
        at, self._at = self._at, {}
        if "arrives" not in at:  # it was not a whole step
            return
        waited = at["waited"]()
        read = at["arrives"] - at.get("begins", at["arrives"])
        # Before the first passes of a GPU's step is a mark of the host's clock, too.
        met = at["host passes"] - at["arrives"]
        computing, meeting = _between(at["passes"], at["computed"]), _between(at["computed"], at["met"])
        self.own = (read + max(computing - waited, 0.0), met + waited + meeting)

    def gathered(self, step: int, rows: Tensor) -> None:
        """Takes `own` of every rank, the rows [ranks, 2], for `step`."""
        if self._measures and len(rows) == self._mesh.world_size and bool(rows[:, 0].all()):
            self.last = Took(step, rows[:, 0].tolist(), rows[:, 1].tolist())

    def _mark(self, name: str, on_stream: bool = False) -> None:
        if not self._measures:
            return
        if name == "passes":
            self._at["host passes"] = self._clock()
        if not (on_stream and self._on_gpu):
            self._at[name] = self._clock()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._at[name] = event


def _between(first: Any, last: Any) -> float:
    """Seconds between two marks, both of a clock or both events that have happened."""
    if isinstance(first, float):
        return last - first
    last.synchronize()  # the host has waited for what comes after the others; this one follows them at once
    return first.elapsed_time(last) / 1e3


SLOW = 1.2
"""From so many times the median on a rank is slow."""
STEPS = 20
"""Steps in which it must be for the most part, so that a pause alone is no reason to look for a cause."""
MOST, LEAST = 0.8, 0.5
"""That part, and the part below which it is slow no more."""


class Stragglers:
    """Notices a rank whose own work takes longer than that of the ranks that do the same: those of its pipeline stage."""

    def __init__(self, names: Sequence[str], stages: int = 1) -> None:
        """`names` of the hosts of all ranks; the first ranks have the first of `stages`."""
        self._names, self._each = names, len(names) // stages
        self._seen: deque[list[float]] = deque(maxlen=STEPS)
        self._told: int | None = None

    def notice(self, took: Took) -> str:
        """What to tell the user after one more step; '' for nothing."""
        self._seen.append([])
        for first in range(0, len(took.busy), self._each):
            group = took.busy[first : first + self._each]
            usual = statistics.median_low(group)
            self._seen[-1] += [one / usual for one in group]
        if len(self._seen) < STEPS:
            return ""
        often = [sum(step[rank] > SLOW for step in self._seen) / STEPS for rank in range(len(took.busy))]
        slow = [share >= (LEAST if rank == self._told else MOST) for rank, share in enumerate(often)]
        ratios = [statistics.median(step[rank] for step in self._seen) for rank in range(len(took.busy))]
        worst = max(range(len(ratios)), key=lambda rank: ratios[rank] * slow[rank])
        if not slow[worst]:
            before, self._told = self._told, None
            return "" if before is None else f"rank {before} is as fast as the others again"
        if worst == self._told:
            return ""
        self._told = worst
        return (
            f"the other ranks wait for rank {worst} (on {self._names[worst]}): its own work takes {ratios[worst]:.1f} times that "
            f"of the median rank in {STEPS} steps, {human_seconds(took.busy[worst])} in step {took.step}"
        )
