"""The Pareto front of configurations whose axes have error bars: what nothing else beats for certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPSILON = 0.01
"""Relative difference below which two values count as equal."""

Array = NDArray[np.float64]


def front(
    values: Array, halves: Array | None = None, groups: Sequence[str] | None = None, epsilon: float = EPSILON
) -> NDArray[np.bool_]:
    """Which rows of `values` [N, axes] (smaller is better, NaN is unknown) are on the front or overlap it, bool [N].

    Row j beats row i when on every axis the upper end of j's interval is at most (1 + epsilon) times the lower end of i's, and
    on some axis it is certainly smaller by more than epsilon. An axis that is unknown in both says nothing; in one of them, the
    rows cannot be compared. `halves` [N, axes] are half-widths of the intervals. `groups`: rows of different groups with an unknown
    quality in either are not compared (their names differ where quality may). O(N^2 axes).
    """
    count = len(values)
    halves = np.zeros_like(values) if halves is None else np.where(np.isnan(halves), 0.0, halves)
    low, high = values - halves, values + halves
    alive = np.ones(count, bool)
    marks = np.array(groups) if groups is not None else None
    for row in range(count):
        unknown = np.isnan(values)
        apart = (unknown != unknown[row]).any(axis=1)  # known in one, unknown in the other
        with np.errstate(invalid="ignore"):
            never_worse = (high <= low[row] * (1 + epsilon)) | (unknown & unknown[row])
            better = high < low[row] * (1 - epsilon)
        beats = never_worse.all(axis=1) & better.any(axis=1) & ~apart
        if marks is not None:
            beats &= marks == marks[row]
        beats[row] = False
        alive[row] = not beats.any()
    return alive


def chosen(values: Array, weights: Sequence[float]) -> int | None:
    """The row with the least weighted geometric mean of its axes, each relative to the least known value of the axis.

    Rows with an unknown axis that has a weight are left out, unless it is unknown in all rows; None where nothing is left. A
    geometric mean does not depend on units, nor on what is far away.
    """
    weight = np.asarray(weights, float)
    if not len(values):
        return None
    used = [axis for axis in range(values.shape[1]) if weight[axis] and not np.isnan(values[:, axis]).all()]
    if not used:
        return 0
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(values[:, used], 1e-300)) @ weight[used]
    return None if np.isnan(logs).all() else int(np.nanargmin(logs))
