"""Weights under caps, in proportion to wanted weights."""

from __future__ import annotations

import numpy as np


def fill(wanted: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Weights that sum to 1: equal to the cap where it binds, elsewhere in proportion to `wanted` (>= 0).

    All float64 [n]; the caps of sources with `wanted` > 0 must sum to at least 1.
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
