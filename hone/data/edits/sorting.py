"""Kernels that put rows in order: groups of equal keys by rank and place, and rows by a small number."""

from __future__ import annotations

import numpy as np
from numba import njit

_FEW = 24


@njit(cache=True, nogil=True)
def within_groups(key: np.ndarray, rank: np.ndarray, start: np.ndarray) -> np.ndarray:
    """int64 [k]: the order by (key, rank, start) of rows that are sorted by `key` already."""
    order = np.arange(len(key))
    first = 0
    while first < len(key):
        last = first + 1
        while last < len(key) and key[last] == key[first]:
            last += 1
        if last - first <= _FEW:
            for place in range(first + 1, last):
                row = order[place]
                at = place
                while at > first and (
                    rank[order[at - 1]] > rank[row]
                    or (rank[order[at - 1]] == rank[row] and start[order[at - 1]] > start[row])
                ):
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = row
        else:
            order[first:last] = first + np.argsort(start[first:last], kind="mergesort")
            order[first:last] = order[first:last][np.argsort(rank[order[first:last]], kind="mergesort")]
        first = last
    return order


@njit(cache=True, nogil=True)
def by_number(numbers: np.ndarray) -> np.ndarray:
    """int64 [k]: the stable order by `numbers`, which are not negative and not much larger than there are rows."""
    most = 0
    for number in numbers:
        most = max(most, number)
    places = np.zeros(most + 2, np.int64)
    for number in numbers:
        places[number + 1] += 1
    for number in range(most):
        places[number + 1] += places[number]
    order = np.empty(len(numbers), np.int64)
    for row in range(len(numbers)):
        order[places[numbers[row]]] = row
        places[numbers[row]] += 1
    return order
