"""Weights under caps: filling up in proportion, and the nearest point of the capped simplex."""

from __future__ import annotations

import numpy as np


def fill(wanted: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Weights that sum to 1: at their cap where it binds, elsewhere in proportion to `wanted` (>= 0).

    All float64 [n]; the caps of what is wanted must sum to at least 1.
    """
    free = wanted > 0
    assert (wanted >= 0).all() and caps[free].sum() >= 1 - 1e-9, f"caps {caps} are too tight for {wanted}"
    weights = np.where(free, caps, 0.0)
    while free.any():
        scaled = (1 - weights[~free].sum()) * wanted / wanted[free].sum()
        over = free & (scaled > caps)
        if not over.any():
            return np.where(free, scaled, weights)
        free &= ~over
    return weights


def project(point: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """The point of {w: sum w = 1, 0 <= w <= caps} nearest to `point`: clip(point - shift, 0, caps) for the right shift.

    The sum falls with the shift, piece by piece linearly between the points where some weight meets a bound, so the
    shift is found exactly among them. All float64 [n]; `caps` must sum to at least 1.
    """
    turns = np.unique(np.concatenate([point - caps, point]))
    sums = np.clip(point[None] - turns[:, None], 0, caps[None]).sum(1)
    place = int(np.searchsorted(-sums, -1.0, side="right")) - 1  # the last turn at which the sum is still >= 1
    if place < 0:
        return caps / caps.sum()  # the caps sum to one, up to rounding
    low, high = sums[place], sums[min(place + 1, len(sums) - 1)]
    if low - high <= 0:
        shift = turns[place]
    else:
        shift = turns[place] + (low - 1) / (low - high) * (turns[place + 1] - turns[place])
    return np.clip(point - shift, 0, caps)
