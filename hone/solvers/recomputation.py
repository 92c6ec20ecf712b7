"""Which layers recompute their activations: the exact choice with the fewest seconds of a step within each rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RankLayers(NamedTuple):
    """The layers of one pipeline rank, or of all of them without stages."""

    layers: tuple[int, ...]
    """Their numbers in the model."""
    seconds: float
    """Of a micro-batch's passes when all of them are kept."""
    again_s: tuple[float, ...]
    """What a micro-batch takes more where a layer is recomputed, by layer."""
    kept_bytes: tuple[float, ...]
    """What all micro-batches in memory at once take more where a layer is kept, by layer."""
    room: float
    """Bytes that kept layers may take together."""


def least_recomputation(ranks: Sequence[RankLayers], passes: int) -> tuple[int, ...] | None:
    """The layers to recompute, in order, such that a step of `passes` micro-batches is the shortest; None where no choice fits.

    A step of a pipeline takes the passes of its slowest rank and, until that is full, those of each other one (1F1B: Narayanan et al.
    2021, arXiv:2104.04473): (passes - 1) max t + sum t, t a rank's seconds a micro-batch. A mixed-integer program with a variable for each
    layer, solved to the end by HiGHS (Huangfu and Hall 2018), whose tolerance is a millionth of the largest layer; of equal layers of a rank
    the first ones are recomputed.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    if any(one.room < 0 for one in ranks):
        return None
    count = sum(len(one.layers) for one in ranks)
    unit_s = max((one.seconds + sum(one.again_s) for one in ranks), default=0.0) or 1.0
    unit_bytes = max((value for one in ranks for value in one.kept_bytes), default=0.0) or 1.0
    cost = [again / unit_s for one in ranks for again in one.again_s] + [float(passes - 1)]
    rows, low = [], []
    first = 0
    for one in ranks:
        own = slice(first, first + len(one.layers))
        kept, slowest = np.zeros(count + 1), np.zeros(count + 1)
        kept[own] = np.array(one.kept_bytes) / unit_bytes
        rows.append(kept)  # what is recomputed frees at least what is too much
        low.append((sum(one.kept_bytes) - one.room) / unit_bytes)
        slowest[own], slowest[-1] = -np.array(one.again_s) / unit_s, 1.0
        rows.append(slowest)
        low.append(one.seconds / unit_s)
        first = own.stop
    whole = np.array([1] * count + [0])
    found = milp(
        cost,
        integrality=whole,
        bounds=Bounds(0, np.array([1.0] * count + [np.inf])),
        constraints=LinearConstraint(np.array(rows), np.array(low), np.inf),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return tuple(sorted(_first_ones(ranks, found.x[:count] > 0.5)))


def _first_ones(ranks: Sequence[RankLayers], chosen: Sequence[bool]) -> list[int]:
    """The chosen layers, of equal ones of a rank the first."""
    found, place = [], 0
    for one in ranks:
        kinds: dict[tuple[float, float], list[int]] = {}
        taken: dict[tuple[float, float], int] = {}
        for layer, *kind in zip(one.layers, one.again_s, one.kept_bytes, strict=True):
            key = (kind[0], kind[1])
            kinds.setdefault(key, []).append(layer)
            taken[key] = taken.get(key, 0) + bool(chosen[place])
            place += 1
        found += [layer for key, layers in kinds.items() for layer in layers[: taken[key]]]
    return found


def step_seconds(ranks: Sequence[RankLayers], passes: int, layers: Sequence[int]) -> float:
    """The seconds that `least_recomputation` makes least, with `layers` recomputed."""
    each = [
        one.seconds + sum(again for layer, again in zip(one.layers, one.again_s, strict=True) if layer in layers)
        for one in ranks
    ]
    return (passes - 1) * max(each) + sum(each)


def fits(ranks: Sequence[RankLayers], layers: Sequence[int]) -> bool:
    """Whether every rank has room for its layers that are not among `layers`."""
    return all(
        sum(size for layer, size in zip(one.layers, one.kept_bytes, strict=True) if layer not in layers)
        <= one.room + 1e-6 * max(one.kept_bytes, default=0.0)
        for one in ranks
    )
