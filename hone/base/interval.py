"""Means with intervals: what a few repetitions can and cannot tell apart, by Student's t, without a library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

LEVEL = 0.95
"""Share of intervals that hold the true value."""
_TINY = 1e-300
_TERMS = 100_000


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
    """The value below which Student's t with `freedom` > 0 degrees of freedom stays with `probability`, in (0, 1).

    Right to 12 digits up to a thousand degrees of freedom, to 8 up to a million.
    """
    if probability <= 0.5:
        return -t_quantile(1 - probability, freedom) if probability < 0.5 else 0.0
    if math.isinf(freedom):
        return statistics.NormalDist().inv_cdf(probability)
    tail = 1 - probability
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, freedom) > tail else (low, middle)
    return high


def t_tail(value: float, freedom: float) -> float:
    """Chance that Student's t with `freedom` degrees of freedom is above `value` >= 0."""
    square = value * value / freedom
    if value < 1:  # 1 / (1 + square) would round the value away
        return 0.5 * (1 - incomplete_beta(square / (1 + square), 0.5, freedom / 2))
    return 0.5 * incomplete_beta(1 / (1 + square), freedom / 2, 0.5)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), 0 <= x <= 1, a and b above 0."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror converges fast
        return 1 - incomplete_beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b) (DLMF 8.17.22), by Lentz's way: 1 + d1/(1 + d2/(1 + ...))."""
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, _TERMS):
        m = term // 2
        if term % 2:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + part * d) or _TINY)
        c = (1 + part / c) or _TINY
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            return value
    raise AssertionError(f"the continued fraction of I_{x}({a}, {b}) does not converge")
