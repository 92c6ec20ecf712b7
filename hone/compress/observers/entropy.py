"""The range whose rounded inputs are distributed most like the inputs.

Shapes: B bins of equal width, V distinct values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.base.lazy import lazy
from hone.compress.observers.base import Observer, counted, rounded

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Activations

torch = lazy("torch")

BINS = 4096
"""Bins of equal width over the whole range."""
RATIOS = [step / 128 for step in range(128, 7, -1)]
"""Fractions of the range that are tried, down to 1/16: with 128 levels a side and 16 bins a level, those of the paper."""


class Entropy(Observer):
    """Tries fractions of the range; keeps that of least Kullback-Leibler divergence of the rounded from the clipped histogram. Wu et al. 2020, arXiv:2004.09602."""

    paper: ClassVar[str] = "arXiv:2004.09602"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes", "histogram"})
    grouped: ClassVar[bool] = False

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        low = min(float(statistics["extremes"][:, 0].min()), 0.0)
        high = max(float(statistics["extremes"][:, 1].max()), 0.0)
        if low == high:
            return low, high
        if activations.symmetric:
            low, high = -max(-low, high), max(-low, high)
        centers, counts = bins(*counted(statistics["histogram"]), low, high)
        ends = [(low * ratio, high * ratio) for ratio in RATIOS]
        return min(ends, key=lambda one: divergence(centers, counts, activations, *one))


def bins(values: Tensor, counts: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(centers, counts) float64 [B] of bins of equal width over [low, high].

    The counts of a value of the histogram are spread over the interval that was rounded to it, up to the middle between it
    and its neighbours: where neighbours lie further apart than bins, empty bins would look like structure.
    """
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.cat((values.new_tensor([low]), middles.clamp(low, high), values.new_tensor([high])))
    total = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    borders = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    right = torch.searchsorted(edges, borders).clamp(1, len(edges) - 1)
    width = (edges[right] - edges[right - 1]).clamp(min=torch.finfo(torch.float64).tiny)
    share = ((borders - edges[right - 1]) / width).clamp(0, 1)
    cumulated = total[right - 1] + share * (total[right] - total[right - 1])
    return (borders[1:] + borders[:-1]) / 2, cumulated.diff()


def divergence(centers: Tensor, counts: Tensor, activations: Activations, low: float, high: float) -> float:
    """Sum of p log(p / q): p is the histogram clipped to [low, high]; q spreads the unclipped counts of each rounded value
    over the bins that are rounded to it and not empty."""
    inside = (centers >= low) & (centers <= high)
    if int(inside.sum()) < 2:
        return float("inf")
    kept = counts[inside]
    p = kept.clone()
    p[0] += counts[centers < low].sum()
    p[-1] += counts[centers > high].sum()
    _, level = torch.unique(rounded(centers[inside], activations, low, high), return_inverse=True)
    there = p > 0
    sums = torch.zeros(int(level.max()) + 1, dtype=torch.float64)
    sizes = sums.clone().index_add_(0, level, there.double())
    sums.index_add_(0, level, kept)
    q = (sums / sizes.clamp(min=1))[level]
    p, q = p[there] / p.sum(), q[there] / kept.sum()
    if bool((q <= 0).any()):
        return float("inf")
    return float((p * (p / q).log()).sum())
