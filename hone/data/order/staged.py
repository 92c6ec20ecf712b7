"""Staged curriculum: from the easy rows to the hard ones, in random order inside each stage."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.data.load import PackedTokens
from hone.data.order.base import ByDifficulty, Epochs, Sequence


class Staged(ByDifficulty):
    """Each epoch goes through stages of rising difficulty. Zhang et al. 2025, arXiv:2506.11300.

    The rows are those that random order would show, so that two runs differ in order alone. As many stages as rows
    would sort them fully.
    """

    paper: ClassVar[str] = "arXiv:2506.11300"
    num_stages: int = Field(4, ge=1, description="Stages of as many rows each.")

    def sequence(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Sequence:
        rows = data.need_rows(seq_len)
        hardness = self.difficulty(data, seq_len)

        def order(epoch: int, chosen: np.ndarray) -> np.ndarray:
            by_hardness = np.argsort(hardness[chosen], kind="stable")
            stage = np.empty(len(chosen), np.int64)
            stage[by_hardness] = np.arange(len(chosen)) * self.num_stages // len(chosen)
            return chosen[np.argsort(stage, kind="stable")]

        return Epochs(rows, total, seed, order)
