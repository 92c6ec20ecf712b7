"""The multiple-choice knapsack: one option for every item, the least total loss within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
