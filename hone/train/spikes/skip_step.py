"""SkipStep: a step whose loss or gradient norm is an outlier against the steps before is skipped."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hone.base.spec import Spec


class SkipStep(Spec):
    """Skips the update of a step whose loss or gradient norm is above mean + `sigma_factor` x standard deviation of the last ones'.

    The rule and the defaults of OLMo-core's `SkipStepOptimizer` (github.com/allenai/OLMo-core). PaLM (arXiv:2204.02311, section 5.1)
    went back to a checkpoint about 100 steps before a spike and left out 200 to 500 batches (`Rewind`); here a batch is left out before
    its update. `skip_step: true` is short for the defaults.
    """

    field: ClassVar[str] = "skip_step"

    rolling_interval_length: int = Field(
        128, ge=4, description="Steps of the running window; none is skipped before half of it is there."
    )
    sigma_factor: float = Field(
        6.0, gt=0, description="Standard deviations above the window's mean from which a value is an outlier."
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_the_defaults(cls, values: Any) -> Any:
        return {} if values is True else values


class Spikes:
    """The losses and gradient norms of the last steps, and the judgement of the next one by them; without a `spec` none is skipped.

    The numbers are those of all ranks, so that all judge alike. A value above its limit enters its window as the limit: one
    spike does not hide the next, and a level that stays is accepted after some steps.
    """

    def __init__(self, spec: SkipStep | None) -> None:
        self.spec = spec
        self.windows: dict[str, list[float]] = {"loss": [], "gradient norm": []}
        self.in_a_row = 0
        """Steps skipped one after the other."""

    def judge(self, loss: float, norm: float) -> str:
        """Why the step with these is to be skipped; '': it is not. They are among the last ones then."""
        if self.spec is None:
            return ""
        length, sigmas, said = self.spec.rolling_interval_length, self.spec.sigma_factor, []
        for (name, window), value in zip(self.windows.items(), (loss, norm), strict=True):
            if len(window) >= length // 2:
                mean, deviation = fmean(window), pstdev(window)
                limit = mean + sigmas * deviation
                if not value <= limit:  # so is NaN
                    said.append(
                        f"{name} {value:.4g} is not within {limit:.4g} = {mean:.4g} + {sigmas:g} x {deviation:.3g}"
                    )
                    value = limit
            if math.isfinite(value):
                window.append(value)
                del window[:-length]
        self.in_a_row = self.in_a_row + 1 if said else 0
        return " and ".join(said)

    @property
    def stuck(self) -> bool:
        """Whether as many steps were skipped in a row as the window has: skipping does not help."""
        return self.spec is not None and self.in_a_row >= self.spec.rolling_interval_length

    def state(self) -> dict[str, Any]:
        """The numbers to store in a checkpoint."""
        return {"windows": self.windows, "in_a_row": self.in_a_row} if self.spec is not None else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`."""
        if state:
            self.windows, self.in_a_row = state["windows"], state["in_a_row"]
