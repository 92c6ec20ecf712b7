"""Random order: every epoch its own shuffle, what training does without a curriculum."""

from __future__ import annotations

from hone.data.load import PackedTokens
from hone.data.order.base import Curriculum, Epochs, Sequence


class Random(Curriculum):
    """Rows in random order, each once an epoch."""

    def sequence(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Sequence:
        return Epochs(data.need_rows(seq_len), total, seed, lambda epoch, chosen: chosen)
