"""Warm-up then random: a first part of the training by difficulty, the rest as ever."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.load import PackedTokens
from hone.data.order.base import ByDifficulty, Epochs, Sequence


class WarmupThenRandom(ByDifficulty):
    """The first rows of the training go from easy to hard, the others in random order. Zhang et al. 2025, arXiv:2506.11300.

    The warm-up sorts the rows that random order would show in that time, so its end is as hard as the data are.
    """

    paper: ClassVar[str] = "arXiv:2506.11300"
    fraction: float = Field(0.2, gt=0, le=1, description="Share of the training's rows that are sorted.")

    def sequence(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Sequence:
        rows = data.need_rows(seq_len)
        sorted_rows = round(self.fraction * total)
        if sorted_rows > rows:
            raise SpecError(
                f"curriculum.fraction = {self.fraction:g} of {total} rows is {sorted_rows}, an epoch has {rows}",
                fix=f"give a fraction of at most {rows / total:.3g}: a warm-up sorts new rows, each once",
            )
        hardness = self.difficulty(data, seq_len)

        def order(epoch: int, chosen: np.ndarray) -> np.ndarray:
            if epoch:
                return chosen
            first, rest = chosen[:sorted_rows], chosen[sorted_rows:]
            return np.concatenate([first[np.argsort(hardness[first], kind="stable")], rest])

        return Epochs(rows, total, seed, order)
