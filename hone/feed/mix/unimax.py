"""UniMax mixture: as uniform as a cap on epochs allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hone.feed.mix.base import Mixture, Source, sizes


class UniMax(Mixture):
    """Every source an equal share, but at most `max_epochs` epochs of any. Chung et al. 2023, arXiv:2304.09151.

    From the smallest source up: each gets an equal share of the remaining budget, or all its epochs when these are
    less; the rest goes to the larger ones.
    """

    paper: ClassVar[str] = "arXiv:2304.09151"

    def wants(self, sources: Sequence[Source], budget: float) -> tuple[np.ndarray, list[float | None], list[str]]:
        tokens = sizes(sources)
        given = np.zeros(len(sources))
        reasons = [""] * len(sources)
        left = budget
        order = np.argsort(tokens, kind="stable")
        for place, index in enumerate(order):
            equal = left / (len(order) - place)
            given[index] = min(equal, self.max_epochs * tokens[index])
            left -= given[index]
            reasons[index] = f"an equal share of what was left would be {equal / budget:.1%}"
        return given / budget, [None] * len(sources), reasons
