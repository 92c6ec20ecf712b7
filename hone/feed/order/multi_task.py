"""Multi-task order: the sources of one artifact interleaved, so that every batch has all of them in their shares."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from hone.feed.load import PackedTokens
from hone.feed.order.base import Curriculum, Epochs, Order, sequence_pieces
from hone.feed.order.documents import named


class MultiTask(Curriculum):
    """Random order within each source, and the sources spread evenly over the epoch."""

    by: str = Field("group", min_length=1, description="Column of the documents that names their source.")

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        num_sequences = data.need_sequences(seq_len)
        source = self.sources(data, seq_len)

        def order(epoch: int, chosen: np.ndarray) -> np.ndarray:
            # The j-th of n sequences of a source is at (j + 1/2) / n of the epoch, in random order within the source.
            own = source[chosen]
            grouped = np.argsort(own, kind="stable")
            counts = np.bincount(own)
            firsts = np.cumsum(counts) - counts
            ranks = np.empty(len(chosen), np.int64)
            ranks[grouped] = np.arange(len(chosen)) - firsts[own[grouped]]
            return chosen[np.lexsort((own, (ranks + 0.5) / counts[own]))]

        return Epochs(num_sequences, total, seed, order)

    def sources(self, data: PackedTokens, seq_len: int) -> np.ndarray:
        """The source of most of each sequence's tokens, numbered in order of names; int64 [num_sequences]."""
        known, codes = named(data.columns(self.by)[self.by], f"curriculum.by = '{self.by}'")
        sequences, owners, sizes = sequence_pieces(data, seq_len)
        pairs, places = np.unique(sequences * len(known) + codes[owners], return_inverse=True)
        tokens = np.bincount(places, weights=sizes)
        order = np.lexsort((pairs, -tokens, pairs // len(known)))  # of equal counts the first by name
        _, firsts = np.unique(pairs[order] // len(known), return_index=True)
        return pairs[order][firsts] % len(known)
