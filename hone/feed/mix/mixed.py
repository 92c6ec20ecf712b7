"""MixedTokens: sequences of several sources in fixed shares, drawn by a low-discrepancy sequence, without rewriting any shard."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from hone.base.errors import SpecError
from hone.feed.load import Batch, Feed

_STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, made odd: its multiples modulo 2^64 are the most evenly distributed."""
_CIRCLE = 1 << 64


class Shares:
    """The source of each sequence of a mixture: sequence i falls at (i x golden ratio + offset) mod 1 among the cumulative weights.

    A pure function of the index: after n sequences, a source's share differs from its weight by O(log n) sequences (below 8
    in half a million), where independent draws would differ by O(sqrt n). `weights` are positive and sum to 1.
    """

    def __init__(self, weights: np.ndarray, seed: int) -> None:
        assert (weights > 0).all() and abs(weights.sum() - 1) < 1e-9, f"weights {weights}"
        ends = [min(int(end * _CIRCLE), _CIRCLE) for end in np.cumsum(weights / weights.sum())]
        self.ends = [*ends[:-1], _CIRCLE]
        self.offset = int.from_bytes(hashlib.sha256(f"mixture {seed}".encode()).digest()[:8], "little")

    def sources(self, indices: np.ndarray) -> np.ndarray:
        """The sources of the sequences `indices` (int64 [B]), int64 [B]."""
        places = indices.astype(np.uint64) * np.uint64(_STEP) + np.uint64(self.offset)
        inner = np.array([min(end, _CIRCLE - 1) for end in self.ends[:-1]], np.uint64)
        return np.searchsorted(inner, places, side="right")

    def before(self, index: int) -> list[int]:
        """How many of the sequences 0 .. index - 1 each source has: a sum of floors, exact in O(log) steps."""
        # floor(v / C) - floor((v - end) / C) is 1 exactly where v mod C < end.
        whole = floor_sum(index, _CIRCLE, _STEP, self.offset)
        below = [whole - (floor_sum(index, _CIRCLE, _STEP, self.offset - end + _CIRCLE) - index) for end in self.ends]
        return [here - earlier for here, earlier in zip(below, [0, *below])]

    def ranks(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, index among the source's own sequences) of the sequences `indices`, int64 [B] each."""
        if not len(indices):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first, last = int(indices.min()), int(indices.max())
        if last - first > 64 * len(indices):  # far apart: each computed separately
            pairs = [self.ranks(indices[place : place + 1]) for place in range(len(indices))]
            return np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])
        span = self.sources(np.arange(first, last + 1))
        ranks = np.empty(len(span), np.int64)
        for source, start in enumerate(self.before(first)):
            here = np.flatnonzero(span == source)
            ranks[here] = start + np.arange(len(here))
        return span[indices - first], ranks[indices - first]


class MixedTokens(Feed):
    """The Feed of several sources with shares `weights`; a source with weight 0 is never read.

    Each source is read in its own order (one epoch of its sequences after another). Raises SpecError for sources with
    different tokenizers.
    """

    def __init__(self, parts: Mapping[str, Feed], weights: Mapping[str, float]) -> None:
        if set(parts) != set(weights):
            raise SpecError(
                f"weights for {', '.join(weights)}, sources {', '.join(parts)}", fix="give every source one weight"
            )
        self.names = [name for name in parts if weights[name] > 0]
        if not self.names:
            raise SpecError("every weight is 0", fix="give a source a weight above 0")
        self.parts = [parts[name] for name in self.names]
        shares = np.array([weights[name] for name in self.names], float)
        self.weights = shares / shares.sum()
        self._shares: dict[int, Shares] = {}

    def shares(self, seed: int) -> Shares:
        """The source of each sequence, for the seed of a training."""
        if seed not in self._shares:
            self._shares = {seed: Shares(self.weights, seed)}
        return self._shares[seed]

    def totals(self, num_sequences: int, seed: int) -> dict[str, int]:
        """Sequences of each source among the first `num_sequences`."""
        return dict(zip(self.names, self.shares(seed).before(num_sequences)))

    def sequences(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Sequences with indices `indices` (int64 [B]) of the endless mixture."""
        sources, ranks = self.shares(seed).ranks(indices)
        shape = (len(indices), seq_len)
        found = Batch(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32))
        for number in np.unique(sources):
            here = sources == number
            for whole, part in zip(found, self.parts[number].sequences(ranks[here], seq_len, seed)):
                whole[here] = part
        return found


def floor_sum(count: int, modulus: int, step: int, offset: int) -> int:
    """The sum of floor((step * i + offset) / modulus) over i = 0 .. count - 1, for offset >= 0, by Euclid's algorithm."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // modulus) + count * (offset // modulus)
        step, offset = step % modulus, offset % modulus
        highest = step * count + offset
        if highest < modulus:
            break
        count, offset = divmod(highest, modulus)
        modulus, step = step, modulus
    return total
