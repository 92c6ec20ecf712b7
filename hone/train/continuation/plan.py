"""The plan of a training: its steps, where it starts, and the disk that its checkpoints need."""

from __future__ import annotations

from typing import Any

from hone.base.figure import human_bytes
from hone.base.plan import DISK, Plan, Shortage
from hone.cost.train.training import CHECKPOINTS
from hone.train.continuation.start import Start


class TrainPlan(Plan):
    """A plan with the number of steps; checkpoints need disk beside the finished folder."""

    steps: int
    """Of the schedule: with those that were done before `start`."""
    segments: Any = ()
    """The layers' activation checkpointing, as it was chosen."""
    start: Any = Start()
    """Where it starts."""
    schedule: Any = None
    """The schedule, as it goes on from `start`."""
    pipeline: Any = None
    """(Layers of each stage, its drawing for the report); None without stages."""
    grown: Any = None
    """What is known of its growth (hone.train.growth.figures.Grown)."""
    offload: Any = None
    """Where its state is, as it was chosen."""
    repeats: tuple[str, ...] = ()
    """Of `notes`, those on data that are read again and again, and on the places of its state, which the run says too."""

    def shortages(self, capacity: dict[str, float]) -> list[Shortage]:  # type: ignore[override]
        """As `Plan.shortages`, including the checkpoints."""
        found = super().shortages(capacity)
        if CHECKPOINTS in self.estimates and DISK in capacity and all(one.name != DISK for one in found):
            kept, folder = self.estimates[CHECKPOINTS], self.estimates[DISK]
            if kept.value + folder.value > capacity[DISK]:
                formula = f"checkpoints {kept.formula} + the finished folder {human_bytes(folder.value)}"
                ways = (
                    "lower checkpoint.keep_latest_k",
                    "raise checkpoint.interval above steps",
                    "write to another disk: --out or --work",
                )
                found.append(Shortage(DISK, kept.value + folder.value, capacity[DISK], formula, ways))
        return found
