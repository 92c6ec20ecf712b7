"""Staged curriculum: from easy to hard sequences, in random order within each stage."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.feed.load import PackedTokens
from hone.feed.order.base import ByDifficulty, Epochs, Order


class Staged(ByDifficulty):
    """Each epoch goes through stages of rising difficulty. Zhang et al. 2025, arXiv:2506.11300.

    The sequences are those that random order would read, so that two runs differ in order alone. With as many stages as
    sequences they are fully sorted.
    """

    paper: ClassVar[str] = "arXiv:2506.11300"
    num_stages: int = Field(4, ge=1, description="Number of stages, of equal numbers of sequences.")

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        num_sequences = data.need_sequences(seq_len)
        hardness = self.difficulty(data, seq_len)

        def order(epoch: int, chosen: np.ndarray) -> np.ndarray:
            by_hardness = np.argsort(hardness[chosen], kind="stable")
            stage = np.empty(len(chosen), np.int64)
            stage[by_hardness] = np.arange(len(chosen)) * self.num_stages // len(chosen)
            return chosen[np.argsort(stage, kind="stable")]

        return Epochs(num_sequences, total, seed, order)
