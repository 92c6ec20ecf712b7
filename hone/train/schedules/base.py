"""The base of learning-rate schedules: a share of the peak at every step, after a linear warm-up."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.table import Technique


class Schedule(Technique):
    """Linear warm-up to the peak learning rate, then `after_warmup` of the subclass."""

    warmup: float = Field(0.05, ge=0, description="Steps of linear warm-up; a value below 1 is a share of all steps.")
    floor: float = Field(0.1, ge=0, le=1, description="Share of the peak learning rate left at the last step.")

    def share(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at `step` (from 0) of `steps`, in 0..1.

        Raises SpecError when the warm-up is longer than the training.
        """
        warmup = span(self.warmup, steps)
        if warmup > steps:
            raise SpecError(
                f"schedule.warmup = {self.warmup:g} is longer than the training of {steps} steps",
                fix=f"give a warm-up of at most {steps} steps, or a share below 1",
            )
        if step < warmup:
            return (step + 1) / warmup
        return self.after_warmup(step - warmup, steps - warmup)

    def kept_after(self, steps: int) -> int:
        """Of `steps`, the one whose state is worth keeping for a longer training: the last one."""
        return steps

    def after_warmup(self, step: int, steps: int) -> float:
        """Share of the peak at `step` (from 0) of the `steps` that follow the warm-up."""
        raise NotImplementedError


def span(value: float, steps: int) -> int:
    """`value` in steps: itself from 1 up, below 1 its share of `steps`, rounded."""
    return round(value * steps) if value < 1 else round(value)
