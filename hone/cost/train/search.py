"""The best cut of layers into pipeline stages, asked of what says how long a step of a cut takes: all cuts where they are few, else a climb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Cuts = NDArray[np.int64]
"""Cuts [N, stages + 1]: of each the layers at which its stages begin, and the number of layers."""
Asked = Callable[[Cuts], NDArray[np.float64]]
"""Seconds [N] of a step with each of the cuts."""

BETTER = 1e-9
"""The share of a step that another cut must save: sums of equal layers in another order differ by less."""


def search(first: Sequence[int], begins: Sequence[int], seconds: Asked, most: int) -> tuple[Cuts, NDArray[np.float64]]:
    """The cuts that were asked for and their seconds, the best one first: `first` where none is better.

    `first` is a row of `Cuts`; all stages but the first begin at layers of `begins`, which are in order. At most `most` cuts are
    asked for. Every one where there are so few; else a climb from `first`: cuts in which one stage has a layer more (or all to the
    next place of `begins`) and another one less, and from the best of them on, until none is better. Where these are many, only
    of stages beside each other.
    """
    places, inner = np.array([0, *begins, first[-1]]), len(first) - 2
    if comb(len(begins), inner) <= most:
        every = np.array(list(combinations(begins, inner)), np.int64).reshape(-1, inner)
        return _ranked(np.pad(every, ((0, 0), (1, 1)), constant_values=((0, 0), (0, first[-1]))), first, seconds)
    at = np.searchsorted(places, first)
    asked, moves = at[None], _moves(inner, apart=inner * (inner + 1) <= most // 8)
    took = seconds(places[asked])
    best = took[0]
    while True:
        near = at + moves
        near = near[(np.diff(near) > 0).all(axis=1)]
        near = near[~(near[:, None] == asked[None]).all(axis=2).any(axis=1)]
        if not 0 < len(near) <= most - len(asked):
            break
        new = seconds(places[near])
        asked, took = np.concatenate([asked, near]), np.concatenate([took, new])
        if new.min() >= best * (1 - BETTER):
            break
        at, best = near[new.argmin()], new.min()
    return _ranked(places[asked], first, lambda _: took)


def _moves(inner: int, *, apart: bool) -> Cuts:
    """What to add to a cut's places to move one from a stage to another, `apart` or beside it: [moves, inner + 2]."""
    found = []
    for begin in range(1, inner + 1):
        for end in range(begin, inner + 1 if apart else begin + 1):
            one = np.zeros(inner + 2, np.int64)
            one[begin : end + 1] = 1
            found += [one, -one]
    return np.array(found)


def _ranked(cuts: Cuts, first: Sequence[int], seconds: Asked) -> tuple[Cuts, NDArray[np.float64]]:
    """`cuts` by their seconds, `first` before those that are no better."""
    took = seconds(cuts)
    own = (cuts == np.array(first)).all(axis=1)
    order = np.argsort(np.where(own, took * (1 - BETTER), took), kind="stable")
    return cuts[order], took[order]
