"""The base of curricula, which map every step of a training to a packed sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.feed.load import PackedTokens, shuffled

Order = Callable[[np.ndarray], np.ndarray]
"""Maps positions in the training (int64 [B], from 0) to indices of sequences in stored order (int64 [B])."""

SIGNALS: dict[str, tuple[str, str]] = {
    "compression_ratio": ("compression_ratio", "low"),
    "lexical_diversity": ("mtld", "high"),
    "flesch": ("flesch", "low"),
    "length": ("words", "high"),
}
"""Each signal of difficulty: its column, and whether high or low values are hard."""


class Curriculum(Technique):
    """An order of the sequences of a training. An epoch has each sequence once; a run has the same sequences as in random order."""

    def order(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Order:
        """The order of `total` sequences of `seq_len` tokens, a pure function of its arguments."""
        raise NotImplementedError


class ByDifficulty(Curriculum):
    """A curriculum by the difficulty of sequences: the mean over a sequence's tokens of a signal of their documents."""

    signal: str = Field(
        "compression_ratio",
        min_length=1,
        description="Signal of difficulty: compression_ratio, lexical_diversity, flesch, length, or any column of numbers.",
    )
    hard: Literal["high", "low"] | None = Field(
        None, description="Whether high or low values are hard; required for a column other than these four."
    )

    def difficulty(self, data: PackedTokens, seq_len: int) -> np.ndarray:
        """float64 [num_sequences], higher is harder. Raises SpecError for a column that is absent or not numeric."""
        name, end = SIGNALS.get(self.signal, (self.signal, None))
        end = self.hard or end
        column = self._column(data, name)  # a missing column is reported before a missing `hard`
        if end is None:
            raise SpecError(
                f"curriculum.signal = '{self.signal}': whether high or low values are hard is not given",
                fix=f"add hard: high or hard: low, or take one of {', '.join(SIGNALS)}",
            )
        return sequence_means(data, column if end == "high" else -column, seq_len)

    def _column(self, data: PackedTokens, name: str) -> np.ndarray:
        """The column `name`, float64; missing values are replaced by the median."""
        values = data.columns(name)[name]
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool):
            raise SpecError(
                f"curriculum.signal = '{self.signal}' is a column of text, not of numbers",
                fix=f"take one of {', '.join(SIGNALS)}, or another column of numbers",
            )
        column = values.astype(float)
        known = np.isfinite(column)
        if not known.any():
            raise SpecError(
                f"curriculum.signal = '{self.signal}' has no value for any document", fix="take another signal"
            )
        return np.where(known, column, np.median(column[known]))


class Epochs:
    """An Order made of epochs: `order(epoch, chosen)` reorders the sequences that random order would read.

    The last two epochs are cached.
    """

    def __init__(self, count: int, total: int, seed: int, order: Callable[[int, np.ndarray], np.ndarray]) -> None:
        self.count, self.total, self.seed, self.order = count, total, seed, order
        self._kept: dict[int, np.ndarray] = {}

    def __call__(self, places: np.ndarray) -> np.ndarray:
        assert len(places) == 0 or (places.min() >= 0 and places.max() < self.total), f"only {self.total} are ordered"
        epochs, inside = np.divmod(places, self.count)
        found = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._epoch(int(epoch))[inside[here]]
        return found

    def _epoch(self, epoch: int) -> np.ndarray:
        """The sequences of `epoch` in order; of the last epoch only those that the training reads."""
        if epoch not in self._kept:
            while len(self._kept) >= 2:
                self._kept.pop(next(iter(self._kept)))
            chosen = shuffled(self.count, self.seed, epoch)[: self.total - epoch * self.count]
            self._kept[epoch] = self.order(epoch, chosen)
        return self._kept[epoch]


def sequence_pieces(data: PackedTokens, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequence, document, input tokens) of every part of a sequence that is of one document, int64 each."""
    if data.kind == "best_fit":
        index = data.packing_index(seq_len)
        owners = np.searchsorted(data.starts, index.pieces[:, 0], side="right") - 1
        return np.repeat(np.arange(index.num_sequences), np.diff(index.firsts)), owners, index.pieces[:, 1]
    borders = np.minimum(np.arange(data.num_sequences(seq_len) + 1) * seq_len, data.num_tokens)
    points = np.unique(np.concatenate([borders, data.starts[data.starts < borders[-1]]]))
    sequences = np.searchsorted(borders, points[:-1], side="right") - 1
    owners = np.searchsorted(data.starts, points[:-1], side="right") - 1
    return sequences, owners, np.diff(points)


def sequence_means(data: PackedTokens, values: np.ndarray, seq_len: int) -> np.ndarray:
    """Mean over each sequence's input tokens of their documents' `values` (float64 [num_documents]); float64 [num_sequences]."""
    if data.kind == "best_fit":
        index = data.packing_index(seq_len)
        owners = np.searchsorted(data.starts, index.pieces[:, 0], side="right") - 1
        sequences = np.repeat(np.arange(index.num_sequences), np.diff(index.firsts))
        sums = np.bincount(sequences, weights=index.pieces[:, 1] * values[owners], minlength=index.num_sequences)
        return sums / np.bincount(sequences, weights=index.pieces[:, 1], minlength=index.num_sequences)
    # Stream packing: differences of a cumulative sum at the sequences' borders; the mean is subtracted first, so that
    # sums over a long stream keep their precision.
    count = data.num_sequences(seq_len)
    borders = np.minimum(np.arange(count + 1) * seq_len, data.num_tokens)
    middle = float(np.median(values)) if len(values) else 0.0
    sizes = np.diff(data.starts)
    before = np.concatenate([[0.0], np.cumsum(sizes * (values - middle))])
    owners = np.minimum(np.searchsorted(data.starts, borders, side="right") - 1, data.num_documents - 1)
    sums = before[owners] + (borders - data.starts[owners]) * (values[owners] - middle)
    return np.diff(sums) / np.diff(borders) + middle
