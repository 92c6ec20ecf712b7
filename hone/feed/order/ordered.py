"""OrderedTokens: packed tokens in the order of a curriculum."""

from __future__ import annotations

import numpy as np

from hone.base.errors import SpecError
from hone.feed.load import Batch, Feed, PackedTokens
from hone.feed.order.base import Curriculum, Order


class OrderedTokens(Feed):
    """The Feed of a training of `total` sequences of `data` in the order of `curriculum`; its first is sequence `begin` of the order."""

    def __init__(self, data: PackedTokens, curriculum: Curriculum, total: int, begin: int = 0) -> None:
        self.data, self.curriculum, self.total, self.begin = data, curriculum, total, begin
        self._made: tuple[tuple[int, int], Order] | None = None

    def sequences(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Sequences with indices `indices` (int64 [B]) of the training; raises SpecError beyond `total`."""
        if len(indices) and int(indices.max()) >= self.total:
            raise SpecError(
                f"sequence {int(indices.max())} of an order of {self.total} sequences",
                fix="order as many sequences as are trained on",
            )
        return self.data.cut(self.order(seq_len, seed)(indices + self.begin), seq_len)

    def order(self, seq_len: int, seed: int) -> Order:
        """The curriculum's order, cached. Raises SpecError when it does not fit the data."""
        if self._made is None or self._made[0] != (seq_len, seed):
            self._made = (seq_len, seed), self.curriculum.order(self.data, seq_len, self.begin + self.total, seed)
        return self._made[1]
