"""Gradient-boosted regression trees over histograms, in numpy: what RegMix fits to proxy runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_MOST_BINS = 255
_BLOCK = 4096


class _Tree(NamedTuple):
    """Nodes of one tree, node 0 its root. A leaf is its own left child; `value` is what a leaf adds.

    feature int64, border uint8 (bins up to it go left), left and right int64, value float64, all [nodes].
    """

    feature: np.ndarray
    border: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    depth: int


class Boosted:
    """Least-squares boosting with leaf-wise trees. Friedman 2001; histograms and best-first growth as in LightGBM.

    Deterministic: no sampling of rows or columns. `fit` takes x float [n, d] and y float [n].
    """

    def __init__(self, *, trees: int = 300, rate: float = 0.1, leaves: int = 31, least: int = 20) -> None:
        self.trees, self.rate, self.leaves, self.least = trees, rate, leaves, least
        self._edges: list[np.ndarray] = []
        self._grown: list[_Tree] = []
        self._base = 0.0

    def fit(self, x: np.ndarray, y: np.ndarray) -> Boosted:
        """Grows the trees on what the earlier ones left over; returns itself."""
        assert x.ndim == 2 and len(x) == len(y), f"x {x.shape} and y {y.shape} do not fit together"
        self._edges = [_edges(column) for column in x.T]
        self._grown = []
        self._base = float(np.mean(y))
        bins = self._bins(x)
        left_over = y - self._base
        for _ in range(self.trees):
            tree = self._grow(bins, left_over)
            if tree.depth == 0:  # nothing left that a split would explain
                break
            self._grown.append(tree)
            left_over = left_over - _leaf_values(tree, bins)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """float64 [n] for x float [n, d]."""
        total = np.full(len(x), self._base)
        for first in range(0, len(x), _BLOCK):  # small enough to stay in the cache through all trees
            bins = self._bins(x[first : first + _BLOCK])
            for tree in self._grown:
                total[first : first + _BLOCK] += _leaf_values(tree, bins)
        return total

    def _bins(self, x: np.ndarray) -> np.ndarray:
        """uint8 [n, d]: in which interval between its column's edges each value lies."""
        columns = [np.searchsorted(edges, column, side="left") for edges, column in zip(self._edges, x.T)]
        return np.stack(columns, axis=1).astype(np.uint8)

    def _grow(self, bins: np.ndarray, target: np.ndarray) -> _Tree:
        """One tree: always splits the leaf whose best split explains most, until there are enough leaves."""
        feature, border, left, right, value, level = [0], [0], [0], [0], [0.0], [0]
        rows = {0: np.arange(len(target))}
        best = {0: self._split(bins, target, rows[0])}
        while len(rows) < self.leaves:
            node = max(best, key=lambda node: (best[node][0], -node))
            gain, column, place = best[node]
            if gain <= 1e-12:
                break
            del best[node]
            members = rows.pop(node)
            goes_left = bins[members, column] <= place
            feature[node], border[node] = column, place
            for side, part in ((left, members[goes_left]), (right, members[~goes_left])):
                child = len(value)
                side[node] = child
                for row, item in zip((feature, border, left, right, value), (0, 0, child, child, 0.0)):
                    row.append(item)  # type: ignore[arg-type]
                level.append(level[node] + 1)
                rows[child] = part
                best[child] = self._split(bins, target, part)
        for node, part in rows.items():
            value[node] = self.rate * float(target[part].sum()) / len(part)
        return _Tree(
            np.array(feature), np.array(border, np.uint8), np.array(left), np.array(right), np.array(value), max(level)
        )

    def _split(self, bins: np.ndarray, target: np.ndarray, rows: np.ndarray) -> tuple[float, int, int]:
        """(gain, column, bin) of the best split of `rows`; gain 0 when none is allowed."""
        if len(rows) < 2 * self.least:
            return 0.0, 0, 0
        width = bins.shape[1]
        flat = (bins[rows] + (np.arange(width) * (_MOST_BINS + 1))[None]).ravel()
        shape = (width, _MOST_BINS + 1)
        size = shape[0] * shape[1]
        counts = np.bincount(flat, minlength=size).reshape(shape).cumsum(1)
        sums = np.bincount(flat, weights=np.repeat(target[rows], width), minlength=size).reshape(shape).cumsum(1)
        n, total = len(rows), sums[0, -1]
        allowed = (counts >= self.least) & (n - counts >= self.least)
        if not allowed.any():
            return 0.0, 0, 0
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = sums**2 / counts + (total - sums) ** 2 / (n - counts)
        gain = np.where(allowed, gain - total**2 / n, 0.0)
        column, place = divmod(int(np.argmax(gain)), shape[1])
        return float(gain[column, place]), column, place


def _edges(column: np.ndarray) -> np.ndarray:
    """Borders between bins: halfway between distinct values, or quantiles where there are too many."""
    values = np.unique(column)
    if len(values) > _MOST_BINS:
        return np.unique(np.quantile(column, np.linspace(0, 1, _MOST_BINS + 1)[1:-1], method="midpoint"))
    return (values[:-1] + values[1:]) / 2


def _leaf_values(tree: _Tree, bins: np.ndarray) -> np.ndarray:
    """What the tree adds to each row, float64 [n]."""
    nodes = np.zeros(len(bins), np.int64)
    flat, rows = bins.ravel(), np.arange(len(bins)) * bins.shape[1]
    sides = np.stack([tree.right, tree.left], axis=1).ravel()
    for _ in range(tree.depth):
        goes_left = flat[rows + tree.feature[nodes]] <= tree.border[nodes]
        nodes = sides[2 * nodes + goes_left]
    return tree.value[nodes]
