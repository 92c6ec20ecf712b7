"""Confidence intervals of means of few repetitions, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

LEVEL = 0.95
"""Confidence level: the share of intervals that contain the true value."""


class Interval(BaseModel):
    """The interval of a mean: value ± `half_width` contains the true mean in a share `level` of repetitions of the measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    half_width: float = Field(description="Half of it, in the unit of its figure.")
    level: float = Field(LEVEL, gt=0, lt=1, description="Confidence level.")
    n: int | None = Field(
        None,
        description="Independent observations behind it (documents, sequences, seeds; not the tokens in them); empty: an earlier hone kept none.",
    )

    @classmethod
    def of_mean(cls, values: Sequence[float], level: float = LEVEL) -> Interval | None:
        """That of the mean of independent `values`, by Student's t; None for fewer than two."""
        if len(values) < 2:
            return None
        return cls(half_width=half_width(values, level), level=level, n=len(values))

    @classmethod
    def of_ratio(cls, totals: Sequence[float], sizes: Sequence[float], level: float = LEVEL) -> Interval | None:
        """That of sum(totals) / sum(sizes) of independent groups, see `ratio_half_width`; None for fewer than two."""
        half = ratio_half_width(totals, sizes, level)
        return None if half is None else cls(half_width=half, level=level, n=len(totals))


class Difference(NamedTuple):
    """The difference of two means: `by`, and `half` of its interval; `freedom` are Welch's degrees of freedom."""

    by: float
    half: float
    freedom: float

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return abs(self.by) > self.half


def welch(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Difference:
    """The mean of `other` minus that of `base`, without assuming equal variances.

    Welch 1947, "The generalization of Student's problem when several different population variances are involved".
    At least two values each. Without variance the interval has no width and `freedom` is infinite.
    """
    parts = [statistics.variance(values) / len(values) for values in (base, other)]
    by = statistics.fmean(other) - statistics.fmean(base)
    most = max(parts)
    if most == 0:
        return Difference(by, 0.0, math.inf)
    shares = [part / most for part in parts]  # squares of very small variances would underflow
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (base, other), strict=True)
    )
    return Difference(by, t_quantile((1 + level) / 2, freedom) * math.sqrt(sum(parts)), freedom)


def paired(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Difference:
    """The mean of `other[i] - base[i]`, for values measured in pairs under the same circumstances; at least two pairs."""
    differences = [after - before for before, after in zip(base, other, strict=True)]
    freedom = len(differences) - 1
    return Difference(statistics.fmean(differences), half_width(differences, level), freedom)


def half_width(values: Sequence[float], level: float = LEVEL) -> float:
    """Half of the interval of the mean of `values`, of which there are at least two."""
    return t_quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def ratio_half_width(totals: Sequence[float], sizes: Sequence[float], level: float = LEVEL) -> float | None:
    """Half of the interval of sum(totals) / sum(sizes), for groups of `sizes` members each whose values add up to `totals`.

    The groups are independent of each other, their members are not (Cochran, "Sampling Techniques", 1977, 6.4). None for
    fewer than two groups.
    """
    count, whole = len(totals), math.fsum(sizes)
    if count < 2:
        return None
    mean = math.fsum(totals) / whole
    squares = math.fsum((total - mean * size) ** 2 for total, size in zip(totals, sizes, strict=True))
    return t_quantile((1 + level) / 2, count - 1) * math.sqrt(count / (count - 1) * squares) / whole


@lru_cache(maxsize=256)
def t_quantile(probability: float, freedom: float) -> float:
    """The quantile at `probability`, in (0, 1), of Student's t distribution with `freedom` > 0 degrees of freedom."""
    from scipy.special import ndtri, stdtrit  # scipy takes a while to import

    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))
