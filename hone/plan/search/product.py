"""A declared product of axes, walked in blocks of index columns, and scalar functions looked up by columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 18
"""Configurations of a block: its columns stay within some tens of megabytes."""

Columns = dict[str, NDArray[Any]]
"""Equally long arrays by name; a column named as an axis holds places in the axis's values."""


class Product:
    """All combinations of the values of `axes`, in order, the last axis fastest."""

    def __init__(self, axes: Mapping[str, Sequence[Any]]) -> None:
        self.axes = {name: tuple(values) for name, values in axes.items()}
        self.size = math.prod(len(values) for values in self.axes.values())

    def blocks(self) -> Iterator[Columns]:
        """The combinations as places in the axes' values, int64 [n] each, n <= `BLOCK`."""
        lengths = [len(values) for values in self.axes.values()]
        for begin in range(0, self.size, BLOCK):
            numbers = np.arange(begin, min(begin + BLOCK, self.size))
            yield dict(zip(self.axes, np.unravel_index(numbers, lengths), strict=True))

    def column(self, block: Columns, name: str) -> NDArray[Any]:
        """The values of axis `name` in a block; numbers alone."""
        return np.asarray(self.axes[name])[block[name]]

    def at(self, block: Columns, row: int) -> dict[str, Any]:
        """The combination in a row."""
        return {name: values[int(block[name][row])] for name, values in self.axes.items()}


def kept(block: Columns, mask: NDArray[np.bool_]) -> Columns:
    """The rows of `block` where `mask` holds."""
    return {name: column[mask] for name, column in block.items()}


class Lookup:
    """A scalar function of places in axes, computed once for each combination that occurs.

    The arrays of a search are in this way made of the very functions that plan one configuration.
    """

    def __init__(self, function: Callable[..., Sequence[float]], width: int) -> None:
        self.function, self.width = function, width
        self.known: dict[tuple[int, ...], Sequence[float]] = {}

    def __call__(self, *columns: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        """`width` float64 arrays as long as `columns`, which hold small whole numbers from 0 on."""
        lengths = [int(column.max(initial=0)) + 1 for column in columns]
        code = np.ravel_multi_index(columns, lengths)
        found = np.flatnonzero(np.bincount(code, minlength=1))
        table = np.zeros((self.width, int(code.max(initial=0)) + 1))
        for one in found:
            key = tuple(int(place) for place in np.unravel_index(one, lengths))
            if key not in self.known:
                self.known[key] = tuple(self.function(*key))
            table[:, one] = self.known[key]
        return [row[code] for row in table]
