"""OrderedTokens: packed tokens in the order of a curriculum."""

from __future__ import annotations

import numpy as np

from hone.base.errors import SpecError
from hone.data.load import Batch, Feed, PackedTokens
from hone.data.order.base import Curriculum, Sequence


class OrderedTokens(Feed):
    """The Feed of a training of `total` rows of `data` in the order of `curriculum`."""

    def __init__(self, data: PackedTokens, curriculum: Curriculum, total: int) -> None:
        self.data, self.curriculum, self.total = data, curriculum, total
        self._made: tuple[tuple[int, int], Sequence] | None = None

    def rows(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Rows number `indices` (int64 [B]) of the training; SpecError beyond its end, which the order was made for."""
        if len(indices) and int(indices.max()) >= self.total:
            raise SpecError(
                f"row {int(indices.max())} of an order made for {self.total} rows",
                fix="order as many rows as are trained on",
            )
        return self.data.cut(self.sequence(seq_len, seed)(indices), seq_len)

    def sequence(self, seq_len: int, seed: int) -> Sequence:
        """The curriculum's order, kept. Raises SpecError when it does not fit the data."""
        if self._made is None or self._made[0] != (seq_len, seed):
            self._made = (seq_len, seed), self.curriculum.sequence(self.data, seq_len, self.total, seed)
        return self._made[1]
