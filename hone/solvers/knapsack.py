"""The multiple-choice knapsack: one option for every item, the least total loss within a budget of bytes, or the fewest bytes within a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

MOST_UNITS = 200_000
"""Most steps that a budget is divided into; beyond, sizes are rounded up to a multiple of a coarser unit."""


def choose(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int] | None:
    """The option of each item with the least sum of losses[item][option] while the sum of sizes is at most `budget`.

    Dynamic programming over bytes (Kellerer, Pferschy and Pisinger 2004, chapter 11): exact while the sizes' differences
    have a common divisor of at least budget / `MOST_UNITS`; else sizes count as up to one unit more than they are. None
    when nothing fits.
    """
    least = [min(options) for options in sizes]
    room = budget - sum(least)
    if room < 0:
        return None
    extra = [[size - base for size in options] for options, base in zip(sizes, least, strict=True)]
    unit = math.gcd(*(size for options in extra for size in options)) or 1
    unit *= max(1, math.ceil(room / unit / MOST_UNITS))
    units = min(room, sum(max(options) for options in extra)) // unit
    best = np.zeros(units + 1)  # the least loss of the items so far within each number of units
    taken = np.zeros((len(sizes), units + 1), np.uint8)
    for item, (options, values) in enumerate(zip(extra, losses, strict=True)):
        found = np.full(units + 1, np.inf)
        for option, (size, loss) in enumerate(zip(options, values, strict=True)):
            cost = -(-size // unit)
            if cost > units:
                continue
            tried = best[: units + 1 - cost] + loss
            better = tried < found[cost:]
            found[cost:][better] = tried[better]
            taken[item, cost:][better] = option
        best = found
    left, chosen = units, []
    for item in reversed(range(len(sizes))):
        option = int(taken[item, left])
        chosen.append(option)
        left -= -(-extra[item][option] // unit)
    return chosen[::-1]


def smallest(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most: float) -> list[int] | None:
    """The option of each item with the least sum of sizes while the sum of losses[item][option] is at most `most`.

    An integer program, solved by HiGHS without a gap (scipy). None when nothing fits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    least = sum(map(min, losses))
    if least > most:
        return None
    if not sizes:
        return []
    counts = [len(options) for options in sizes]
    starts = np.cumsum([0, *counts])
    one_each = np.zeros((len(sizes), starts[-1]))
    for item, (begin, end) in enumerate(pairwise(starts)):
        one_each[item, begin:end] = 1.0
    flat = np.array([loss - min(options) for options in losses for loss in options])
    # What is above each item's least loss, of what may be: a solver's tolerance is then of the room, not of a nat.
    room = most - least
    scaled = np.minimum(flat / room, 2.0) if room > 0 else np.where(flat > 0, 2.0, 0.0)
    weights = np.array([size for options in sizes for size in options], float)
    for within in (1.0, 1 - 2e-6, 1 - 1e-4):  # less where the solver's tolerance let more through
        found = milp(
            weights / max(weights.max(), 1.0),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(scaled[None], ub=within)],
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        assert found.x is not None, "the options of least loss are within it"
        picked = [int(np.argmax(found.x[begin:end])) for begin, end in pairwise(starts)]
        if sum(options[option] for options, option in zip(losses, picked, strict=True)) <= most:
            return picked
    return [int(np.argmin(options)) for options in losses]
