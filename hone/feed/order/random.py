"""Random order: a new shuffle every epoch, the default of training."""

from __future__ import annotations

from hone.feed.load import PackedTokens
from hone.feed.order.base import Curriculum, Epochs, Order


class Random(Curriculum):
    """Sequences in random order, each once per epoch."""

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        return Epochs(data.need_sequences(seq_len), total, seed, lambda epoch, chosen: chosen)
