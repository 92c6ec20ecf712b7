"""Competence curriculum: the hardest row that may be shown grows with the training."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.data.load import PackedTokens
from hone.data.order.base import ByDifficulty, Sequence

_LEVELS = 256


class Competence(ByDifficulty):
    """Random order among rows no harder than the competence, which grows with its root. Platanios et al. 2019, arXiv:1903.09848.

    At share t of the growth the easiest c(t) = (t (1 - c0^p) + c0^p)^(1/p) of all rows may be shown. Of these the ones
    shown least come first, in random order: the paper draws with replacement, this uses the text evenly. Where one
    epoch suffices each row comes once; easy rows repeat only when the training is so long that nothing else is allowed.
    """

    paper: ClassVar[str] = "arXiv:1903.09848"
    start: float = Field(0.01, gt=0, le=1, description="c0: share of the rows that may be shown at first.")
    growth: float = Field(0.5, gt=0, le=1, description="Share of the training after which every row may be shown.")
    power: float = Field(2.0, gt=0, description="p: 1 grows linearly, 2 as a root: new rows ever more slowly.")

    def competence(self, place: np.ndarray | int, total: int) -> np.ndarray:
        """c at row number `place` of `total`, float64 in 0..1."""
        part = np.minimum(np.asarray(place) / (self.growth * total), 1.0)
        least = self.start**self.power
        return np.minimum((part * (1 - least) + least) ** (1 / self.power), 1.0)

    def sequence(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Sequence:
        """The whole order at once (8 bytes a row): competence rises in 256 steps, each at its lower end."""
        rows = data.need_rows(seq_len)
        by_hardness = np.argsort(self.difficulty(data, seq_len), kind="stable")
        order = by_hardness[self._ranks(rows, total, seed)]
        return lambda places: order[places]

    def _ranks(self, rows: int, total: int, seed: int) -> np.ndarray:
        """The rank in difficulty of every row shown, int64 [total]."""
        shown = np.zeros(rows, np.int32)
        parts = []
        borders = np.unique(np.linspace(0, total, min(_LEVELS, total) + 1).astype(np.int64))
        draws = 0
        for first, end in pairwise(borders):
            allowed = max(int(self.competence(first, total) * rows), 1)
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
