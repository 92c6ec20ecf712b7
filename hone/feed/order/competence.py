"""Competence curriculum: the difficulty limit rises during the training."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.feed.load import PackedTokens
from hone.feed.order.base import ByDifficulty, Order

_LEVELS = 256


class Competence(ByDifficulty):
    """Random order among sequences below a difficulty limit, which rises with the root of time. Platanios et al. 2019, arXiv:1903.09848.

    At fraction t of the growth, the easiest c(t) = (t (1 - c0^p) + c0^p)^(1/p) of all sequences are allowed. Of these, the
    least read come first, in random order: the paper draws with replacement, this reads the text evenly. Where one
    epoch suffices, each sequence is read once; easy sequences repeat only when no other ones are allowed yet.
    """

    paper: ClassVar[str] = "arXiv:1903.09848"
    start: float = Field(0.01, gt=0, le=1, description="c0: share of the sequences allowed at first.")
    growth: float = Field(0.5, gt=0, le=1, description="Share of the training after which every sequence is allowed.")
    power: float = Field(2.0, gt=0, description="p: 1 grows linearly, 2 as the square root.")

    def competence(self, place: np.ndarray | int, total: int) -> np.ndarray:
        """c at position `place` of `total`, float64 in 0..1."""
        part = np.minimum(np.asarray(place) / (self.growth * total), 1.0)
        least = self.start**self.power
        return np.minimum((part * (1 - least) + least) ** (1 / self.power), 1.0)

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        """The whole order, computed at once (8 bytes per sequence): competence rises in 256 steps, each at its lower end."""
        num_sequences = data.need_sequences(seq_len)
        by_hardness = np.argsort(self.difficulty(data, seq_len), kind="stable")
        order = by_hardness[self._ranks(num_sequences, total, seed)]
        return lambda places: order[places]

    def _ranks(self, num_sequences: int, total: int, seed: int) -> np.ndarray:
        """The difficulty rank of every sequence read, int64 [total]."""
        shown = np.zeros(num_sequences, np.int32)
        parts = []
        borders = np.unique(np.linspace(0, total, min(_LEVELS, total) + 1).astype(np.int64))
        draws = 0
        for first, end in pairwise(borders):
            allowed = max(int(self.competence(first, total) * num_sequences), 1)
            left = int(end - first)
            while left:
                seen = shown[:allowed]
                least = np.flatnonzero(seen == seen.min())
                chosen = least[_few(len(least), left, seed, draws)]
                draws += 1
                shown[chosen] += 1
                parts.append(chosen)
                left -= len(chosen)
        return np.concatenate(parts)


def _few(count: int, few: int, *seeds: int) -> np.ndarray:
    """The first `few` of a random permutation of 0 .. count - 1, without sorting the rest."""
    keys = np.random.PCG64([*seeds]).random_raw(count)
    chosen = np.argpartition(keys, few)[:few] if few < count else np.arange(count)
    return chosen[np.argsort(keys[chosen])]
