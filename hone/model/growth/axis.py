"""One axis of a larger model's tensors: which entry of the smaller model's each entry is a copy of, and with what share. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

NEW = -1
"""The source of an entry that is a copy of none."""


@dataclass(frozen=True)
class Axis:
    """`sources` [n']: of each entry that of the `size` before of which it is a copy, or NEW; every one of these is copied at least once.

    `shares` [n']: what an entry has of the weight with which its source was read. Those of all copies of one add up to 1.
    """

    size: int
    sources: Integers
    shares: Floats

    @classmethod
    def of(cls, size: int, sources: Integers, draw: np.random.Generator | None = None) -> Axis:
        """Copies have equal shares, or with `draw` unequal ones: between a third of and three times each other's."""
        weights = np.ones(len(sources)) if draw is None else draw.uniform(0.5, 1.5, len(sources))
        real = sources != NEW
        sums = np.bincount(sources[real], weights[real], minlength=size)
        shares = np.where(real, weights / np.where(real, sums[sources], 1.0), 0.0)
        return cls(size, sources, shares)

    @property
    def grown(self) -> int:
        """n'."""
        return len(self.sources)

    @property
    def same(self) -> bool:
        """Whether every entry is itself."""
        return self.size == self.grown and bool((self.sources == np.arange(self.size)).all())

    @property
    def new(self) -> Flags:
        """[n']: entries that are copies of none."""
        return self.sources == NEW

    @cached_property
    def later(self) -> Flags:
        """[n']: copies that are not the first one of their source."""
        _, first = np.unique(self.sources, return_index=True)
        found = np.ones(self.grown, bool)
        found[first] = False
        return found & ~self.new

    @cached_property
    def even(self) -> Floats:
        """[n']: by how much copies are multiplied so that the mean square over the grown axis is that over the axis before.

        sqrt(n' / (n c)) for each of c copies: the c squares together are n' / n times the source's. New entries are 0, and count.
        """
        counts = np.bincount(self.sources[~self.new], minlength=self.size)
        return np.sqrt(self.grown / (self.size * np.where(self.new, 1, counts[self.sources])))

    def blocks(self, width: int) -> Axis:
        """The axis of which each entry is a block of `width` consecutive ones, as heads are of channels."""
        inside = np.arange(width)
        blocks = self.sources[:, None] * width + inside
        sources = np.where(self.new[:, None], NEW, blocks).reshape(-1)
        return replace(self, size=self.size * width, sources=sources, shares=np.repeat(self.shares, width))


def grouped(keys: Integers, heads: tuple[int, int], groups: tuple[int, int], *, copies: bool) -> Integers | None:
    """The source of each query head, where key head g of `groups[1]` is a copy of `keys[g]`, of `groups[0]`: heads of one group stay in
    one, with equal keys. `heads`: (before, after). Where a group has more places than heads they are copies, or without `copies`
    new. None: a group has too few places."""
    before, after = heads[0] // groups[0], heads[1] // groups[1]
    found = np.full(heads[1], NEW)
    for group in range(groups[0]):
        places = [place * after + one for place in np.flatnonzero(keys == group) for one in range(after)]
        if len(places) < before:
            return None
        for number, place in enumerate(places):
            if copies or number < before:
                found[place] = group * before + number % before
    return found
