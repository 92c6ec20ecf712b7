"""Cosine schedule: after warm-up the learning rate decays along half a cosine to its floor."""

from __future__ import annotations

import math
from typing import ClassVar

from hone.train.schedules.base import Schedule


class Cosine(Schedule):
    """Linear warm-up, then decay along half a cosine. Loshchilov and Hutter 2016 (one cycle), arXiv:1608.03983."""

    paper: ClassVar[str] = "arXiv:1608.03983"

    def after_warmup(self, step: int, steps: int) -> float:
        """floor + (1 - floor) (1 + cos(pi t)) / 2, where t runs from 0 to 1 at the last step."""
        progress = step / max(steps - 1, 1)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
