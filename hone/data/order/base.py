"""What a curriculum is: it says which row of packed text stands at every place of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.data.load import PackedTokens, shuffled

Sequence = Callable[[np.ndarray], np.ndarray]
"""Places in the training (int64 [B], from 0) to numbers of rows in stored order (int64 [B])."""

SIGNALS: dict[str, tuple[str, str]] = {
    "compression_ratio": ("compression_ratio", "low"),
    "lexical_diversity": ("mtld", "high"),
    "flesch": ("flesch", "low"),
    "length": ("words", "high"),
}
"""Signal of difficulty to its column and which end of it is hard."""


class Curriculum(Technique):
    """An order of the rows of a training. An epoch shows each row once; what a run shows is what random order would show."""

    def sequence(self, data: PackedTokens, seq_len: int, total: int, seed: int) -> Sequence:
        """The order of `total` rows of `seq_len` tokens, a pure function of its arguments."""
        raise NotImplementedError


class ByDifficulty(Curriculum):
    """A curriculum that needs to know how hard a row is: the mean over its tokens of a signal of their documents."""

    signal: str = Field(
        "compression_ratio",
        min_length=1,
        description="What tells hard from easy: compression_ratio, lexical_diversity, flesch, length, or any column of numbers.",
    )
    hard: Literal["high", "low"] | None = Field(
        None, description="Which end of the signal is hard; needed for a column that is none of the four."
    )

    def difficulty(self, data: PackedTokens, seq_len: int) -> np.ndarray:
        """float64 [num_rows], higher is harder. Raises SpecError for a column that is absent or holds no numbers."""
        name, end = SIGNALS.get(self.signal, (self.signal, None))
        end = self.hard or end
        column = self._column(data, name)  # whether there is such a column comes before which end of it is hard
        if end is None:
            raise SpecError(
                f"curriculum.signal = '{self.signal}': nothing says which end of it is hard",
                fix=f"add hard: high or hard: low, or take one of {', '.join(SIGNALS)}",
            )
        return row_means(data, column if end == "high" else -column, seq_len)

    def _column(self, data: PackedTokens, name: str) -> np.ndarray:
        """The column `name`, float64; where a document has no value, the median."""
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
    """A Sequence made of epochs: `order(epoch, chosen)` puts the rows that random order would show in another order.

    The last two epochs are kept.
    """

    def __init__(self, rows: int, total: int, seed: int, order: Callable[[int, np.ndarray], np.ndarray]) -> None:
        self.rows, self.total, self.seed, self.order = rows, total, seed, order
        self._kept: dict[int, np.ndarray] = {}

    def __call__(self, places: np.ndarray) -> np.ndarray:
        assert len(places) == 0 or (places.min() >= 0 and places.max() < self.total), (
            f"only {self.total} rows are ordered"
        )
        epochs, inside = np.divmod(places, self.rows)
        found = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._epoch(int(epoch))[inside[here]]
        return found

    def _epoch(self, epoch: int) -> np.ndarray:
        """The rows of `epoch` in order; of the last epoch only those that the training comes to."""
        if epoch not in self._kept:
            while len(self._kept) >= 2:
                self._kept.pop(next(iter(self._kept)))
            chosen = shuffled(self.rows, self.seed, epoch)[: self.total - epoch * self.rows]
            self._kept[epoch] = self.order(epoch, chosen)
        return self._kept[epoch]


def row_pieces(data: PackedTokens, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, document, input tokens) of every stretch of a row that is of one document, int64 each."""
    if data.kind == "best_fit":
        index = data.row_index(seq_len)
        owners = np.searchsorted(data.starts, index.pieces[:, 0], side="right") - 1
        return np.repeat(np.arange(index.num_rows), np.diff(index.firsts)), owners, index.pieces[:, 1]
    borders = np.minimum(np.arange(data.num_rows(seq_len) + 1) * seq_len, data.num_tokens)
    points = np.unique(np.concatenate([borders, data.starts[data.starts < borders[-1]]]))
    rows = np.searchsorted(borders, points[:-1], side="right") - 1
    owners = np.searchsorted(data.starts, points[:-1], side="right") - 1
    return rows, owners, np.diff(points)


def row_means(data: PackedTokens, values: np.ndarray, seq_len: int) -> np.ndarray:
    """Mean over each row's input tokens of their documents' `values` (float64 [num_documents]); float64 [num_rows]."""
    if data.kind == "best_fit":
        index = data.row_index(seq_len)
        owners = np.searchsorted(data.starts, index.pieces[:, 0], side="right") - 1
        rows = np.repeat(np.arange(index.num_rows), np.diff(index.firsts))
        sums = np.bincount(rows, weights=index.pieces[:, 1] * values[owners], minlength=index.num_rows)
        return sums / np.bincount(rows, weights=index.pieces[:, 1], minlength=index.num_rows)
    # Stream rows: a running sum over the tokens, taken at the rows' borders; about the values' middle, so that sums
    # over a long stream keep their digits.
    rows = data.num_rows(seq_len)
    borders = np.minimum(np.arange(rows + 1) * seq_len, data.num_tokens)
    middle = float(np.median(values)) if len(values) else 0.0
    sizes = np.diff(data.starts)
    before = np.concatenate([[0.0], np.cumsum(sizes * (values - middle))])
    owners = np.minimum(np.searchsorted(data.starts, borders, side="right") - 1, data.num_documents - 1)
    sums = before[owners] + (borders - data.starts[owners]) * (values[owners] - middle)
    return np.diff(sums) / np.diff(borders) + middle
