"""What a training may spend and when: a budget of joules, and a schedule of hours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from hone.base.errors import ArtifactError
from hone.base.spec import Circumstance, Spec
from hone.measure.trace import read_trace, summary

if TYPE_CHECKING:
    from hone.train.budget.hours import Hours


class Energy(Spec):
    """A budget of joules, within which a training ends, and the hours in which it runs."""

    budget_j: float | None = Field(
        None,
        gt=0,
        description="Joules that the training may take: where they do not suffice for all steps it is shortened before its decay.",
    )
    power_w: float | None = Field(
        None,
        gt=0,
        description="Watts of all devices together while training, where no sensor is: joules are then modelled, seconds times this.",
    )
    trace: Path | None = Field(
        None,
        description="Power trace of such a training, recorded elsewhere: where no sensor is, its mean watts stand in for power_w.",
    )
    schedule: Annotated[Path | None, Circumstance()] = Field(
        None, description="File of the hours in which it runs, YAML or CSV; in others it pauses. See docs/energy.md."
    )
    threshold: Annotated[float | None, Circumstance()] = Field(
        None, description="Of a schedule of prices or intensities, the most at which it runs."
    )
    pause: Annotated[Literal["sleep", "exit"], Circumstance()] = Field(
        "sleep",
        description="sleep: wait in place for the next hours; exit: save, end with code 75, and go on when started again.",
    )
    interval: Annotated[int, Circumstance()] = Field(
        10, gt=0, description="Steps between looks at joules and clock of several ranks; one alone looks at every step."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Energy:
        if self.threshold is not None and self.schedule is None:
            raise ValueError("threshold is of a schedule: give early_stopping.energy.schedule=FILE")
        if self.power_w is not None and self.budget_j is None:
            raise ValueError("power_w is what a budget reckons with: give early_stopping.energy.budget_j")
        if self.trace is not None and (self.budget_j is None or self.power_w is not None):
            raise ValueError(
                "trace stands in for power_w, what a budget reckons with: give early_stopping.energy.budget_j, and one of the two"
            )
        return self

    @property
    def exact(self) -> bool:
        """Whether it changes nothing of what is made: hours do not, a budget does."""
        return self.budget_j is None

    @property
    def every(self) -> int:
        """Steps between looks of several ranks; 0 where there are none."""
        return self.interval if self.budget_j is not None or self.schedule is not None else 0

    def watts(self) -> tuple[float, str] | None:
        """The watts that stand in for a sensor and where they are from; None: none were given. Raises ArtifactError for a wrong trace."""
        if self.trace is not None:
            found = summary(read_trace(self.trace)).mean_w
            if not found:
                raise ArtifactError(f"{self.trace} has no power", fix="record a trace that lasts: --power_trace")
            return found, f"the mean of {self.trace}, recorded elsewhere"
        return None if self.power_w is None else (self.power_w, "early_stopping.energy.power_w")

    def hours(self) -> Hours | None:
        """The hours of the schedule; None without one. Raises SpecError for a file that is none."""
        from hone.train.budget.hours import read_hours

        return None if self.schedule is None else read_hours(self.schedule, self.threshold)

    def notes(self, steps: int, energy_j: float | None) -> tuple[str, ...]:
        """What a plan of `steps`, that are expected to take `energy_j`, says about it."""
        said = []
        if self.budget_j is not None:
            note = f"ends within {self.budget_j:,.0f} J, if that is before step {steps}"
            if energy_j:
                fits = min(steps, int(steps * self.budget_j / energy_j))
                note += f"; by the calibrated power that is after about {fits} steps (modelled)"
            said.append(note)
        if self.schedule is not None:
            self.hours()
            said.append(f"runs in the hours of {self.schedule} alone; predicted seconds are those of work")
        return tuple(said)
