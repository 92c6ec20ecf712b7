"""Warm-up then random: the first part of the training by difficulty, the rest in random order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.feed.load import PackedTokens
from hone.feed.order.base import ByDifficulty, Epochs, Order


class WarmupThenRandom(ByDifficulty):
    """The first sequences of the training go from easy to hard, the others in random order. Zhang et al. 2025, arXiv:2506.11300.

    The warm-up sorts the sequences that random order would read in that time, so it ends at the highest difficulty of the data.
    """

    paper: ClassVar[str] = "arXiv:2506.11300"
    fraction: float = Field(0.2, gt=0, le=1, description="Share of the training's sequences that are sorted.")

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        num_sequences = data.need_sequences(seq_len)
        num_sorted = round(self.fraction * total)
        if num_sorted > num_sequences:
            raise SpecError(
                f"curriculum.fraction = {self.fraction:g} of {total} sequences is {num_sorted}, more than an epoch of {num_sequences}",
                fix=f"give a fraction of at most {num_sequences / total:.3g}: a warm-up reads each sequence once",
            )
        hardness = self.difficulty(data, seq_len)

        def order(epoch: int, chosen: np.ndarray) -> np.ndarray:
            if epoch:
                return chosen
            first, rest = chosen[:num_sorted], chosen[num_sorted:]
            return np.concatenate([first[np.argsort(hardness[first], kind="stable")], rest])

        return Epochs(num_sequences, total, seed, order)
