"""Means with intervals: what a few repetitions can and cannot tell apart, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

LEVEL = 0.95
"""Share of intervals that hold the true value."""


class Difference(NamedTuple):
    """One mean less another: `by`, and `half` of its interval; `freedom` are Welch's degrees of freedom."""

    by: float
    half: float
    freedom: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.by) > self.half


def welch(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Difference:
    """The mean of `other` less that of `base`, without taking their variances to be equal.

    Welch 1947, "The generalization of Student's problem when several different population variances are involved".
    Two values each are the least. Where nothing varies the interval has no width and `freedom` is infinite.
    """
    parts = [statistics.variance(values) / len(values) for values in (base, other)]
    by = statistics.fmean(other) - statistics.fmean(base)
    most = max(parts)
    if most == 0:
        return Difference(by, 0.0, math.inf)
    shares = [part / most for part in parts]  # squares of very small variances would vanish
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (base, other), strict=True)
    )
    return Difference(by, t_quantile((1 + level) / 2, freedom) * math.sqrt(sum(parts)), freedom)


def paired(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Difference:
    """The mean of `other[i] - base[i]`: for values measured in pairs under the same circumstances. Two pairs are the least."""
    differences = [after - before for before, after in zip(base, other, strict=True)]
    freedom = len(differences) - 1
    return Difference(statistics.fmean(differences), half_width(differences, level), freedom)


def half_width(values: Sequence[float], level: float = LEVEL) -> float:
    """Half of the interval of the mean of `values`, two at least."""
    return t_quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@lru_cache(maxsize=256)
def t_quantile(probability: float, freedom: float) -> float:
    """The value below which Student's t with `freedom` > 0 degrees of freedom stays with `probability`, in (0, 1)."""
    from scipy.special import ndtri, stdtrit  # scipy takes a while to load

    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))
