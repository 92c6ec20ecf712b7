"""WSD schedule: warm-up, a long stable phase at the peak, a short decay at the end."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from hone.train.schedules.base import Schedule, span


class WarmupStableDecay(Schedule):
    """Linear warm-up, a stable phase at the peak, a decay at the end, so that training can be prolonged. Hu et al. 2024, arXiv:2404.06395."""

    paper: ClassVar[str] = "arXiv:2404.06395"
    decay: float = Field(0.2, ge=0, description="Steps of the final decay; a value below 1 is a share of all steps.")
    shape: Literal["exponential", "linear", "sqrt"] = Field(
        "sqrt",
        description="Curve of the decay: exponential as in the paper, linear, or 1 - sqrt(t) (arXiv:2405.18392).",
    )

    def share(self, step: int, steps: int) -> float:
        """As `Schedule.share`, with `decay` in shares of all steps."""
        left = steps - 1 - step  # 0 at the last step
        decay = self._decay(steps)
        if left >= decay:
            return super().share(step, steps)
        # t goes from 1/decay at the first step of the decay to 1 at the last step.
        return self._fall((decay - left) / decay)

    def kept_after(self, steps: int) -> int:
        """The last step before the decay, from which the stable phase can be prolonged."""
        return max(steps - self._decay(steps), 1)

    def _decay(self, steps: int) -> int:
        return min(span(self.decay, steps), steps - span(self.warmup, steps))

    def after_warmup(self, step: int, steps: int) -> float:
        """The stable phase."""
        return 1.0

    def _fall(self, t: float) -> float:
        if self.shape == "exponential":
            # No power reaches 0: a floor of 0 decays to a thousandth, below what bf16 weights resolve.
            return math.exp(t * math.log(max(self.floor, 1e-3)))
        curve = t if self.shape == "linear" else math.sqrt(t)
        return 1 - (1 - self.floor) * curve
