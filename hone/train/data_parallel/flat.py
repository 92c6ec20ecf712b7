"""The layout of a layer's weights in one flat tensor of equal slices, one for each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

ALIGN = 256
"""Elements at whose multiples weights and slices begin: the block of 8-bit optimizer state, and 16 bytes in any dtype."""


class WeightRange(NamedTuple):
    """Elements `start` to `stop` of weight `name`, at element `at` of the slice that holds them."""

    name: str
    start: int
    stop: int
    at: int


class Flat:
    """Weights of `shapes` in a flat tensor of `num_slices` slices of `slice_size` elements; the rest is padding.

    With `whole` no weight is in two slices, for rules that need the whole matrix: the largest go first, each into the
    emptiest slice. Otherwise the weights follow each other, and the slices cut them anywhere.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_slices: int, *, whole: bool) -> None:
        self.shapes, self.num_slices = dict(shapes), num_slices
        self.offsets: dict[str, int] = {}
        if whole:
            used = [0] * num_slices
            order = sorted(self.shapes, key=lambda name: -math.prod(self.shapes[name]))
            places = {}
            for name in order:
                emptiest = used.index(min(used))
                places[name] = (emptiest, used[emptiest])
                used[emptiest] += _aligned(math.prod(self.shapes[name]))
            self.slice_size = max(used)
            self.offsets = {name: number * self.slice_size + at for name, (number, at) in places.items()}
        else:
            end = 0
            for name, shape in self.shapes.items():
                self.offsets[name] = end
                end += _aligned(math.prod(shape))
            self.slice_size = _aligned(-(-end // num_slices))
        self.size = self.slice_size * num_slices

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Weight `name` in `flat` [size]."""
        shape, start = self.shapes[name], self.offsets[name]
        return flat[start : start + math.prod(shape)].view(shape)

    def slice_of(self, flat: Tensor, index: int) -> Tensor:
        """Slice `index` of `flat` [size]."""
        return flat[index * self.slice_size : (index + 1) * self.slice_size]

    def ranges(self, index: int) -> list[WeightRange]:
        """What slice `index` holds."""
        first, last, found = index * self.slice_size, (index + 1) * self.slice_size, []
        for name, shape in self.shapes.items():
            begin, end = self.offsets[name], self.offsets[name] + math.prod(shape)
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                found.append(WeightRange(name, start - begin, stop - begin, start - first))
        return found


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
