"""Ranges of values that one static scale represents, from statistics of the values: what observers and training choose from.

Shapes: C batches, V distinct values, B bins of equal width. `extremes` float [C, 2] are the smallest and largest value of each
batch; a histogram int64 or float64 [65536] counts (or weights) values by the bfloat16 number nearest to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.rounding.inputs import Activations, round_inputs, static_tensors

Range = tuple[float, float]
"""Smallest and largest value to represent."""

RATIOS = [2.0 ** (-step / 8) for step in range(57)]
"""Fractions of the whole range that `least_error` tries, down to 1/128."""

BINS = 4096
"""Bins of equal width over the whole range, of `least_divergence`."""
BIN_RATIOS = [step / 128 for step in range(128, 7, -1)]
"""Fractions of the range that it tries, down to 1/16: with 128 levels a side and 16 bins a level, those of its paper."""


def whole(extremes: Tensor) -> Range:
    """The range of all values."""
    return float(extremes[:, 0].min()), float(extremes[:, 1].max())


def moving_average(extremes: Tensor, momentum: float) -> Range:
    """The average of the batches' ranges in which a new batch weighs `momentum`."""
    (low, high), *later = extremes.tolist()
    for least, most in later:
        low += momentum * (least - low)
        high += momentum * (most - high)
    return low, high


def percentile(histogram: Tensor, share: float, *, symmetric: bool) -> Range:
    """The range with the given share of the values inside; of an asymmetric range half of the rest lies on each side."""
    values, counts = counted(histogram)
    if symmetric:
        order = values.abs().argsort(stable=True)
        edge = _quantile(values.abs()[order], counts[order], share)
        return -edge, edge
    return _quantile(values, counts, (1 - share) / 2), _quantile(values, counts, (1 + share) / 2)


def least_error(extremes: Tensor, histogram: Tensor, activations: Activations) -> Range:
    """The range among `RATIOS` of the whole one with the least sum of squared errors, each value's times its entry in `histogram`."""
    values, counts = counted(histogram)
    low, high = whole(extremes)

    def error(ends: Range) -> float:
        return float(((rounded(values, activations, *ends) - values).square() * counts).sum())

    best = min(((low * ratio, high * ratio) for ratio in RATIOS), key=error)
    if activations.symmetric:
        return best
    best = min(((best[0], high * ratio) for ratio in RATIOS), key=error)  # each end alone
    return min(((low * ratio, best[1]) for ratio in RATIOS), key=error)


def least_divergence(extremes: Tensor, histogram: Tensor, activations: Activations) -> Range:
    """The range among `BIN_RATIOS` of the whole one whose rounded values are distributed most like the values; see `divergence`."""
    low, high = whole(extremes)
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return low, high
    if activations.symmetric:
        low, high = -max(-low, high), max(-low, high)
    centers, counts = bins(*counted(histogram), low, high)
    ends = [(low * ratio, high * ratio) for ratio in BIN_RATIOS]
    return min(ends, key=lambda one: divergence(centers, counts, activations, *one))


def counted(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """(values float64 [V] in ascending order, counts float64 [V]) of a histogram by bfloat16 numbers."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
    there = histogram.cpu() > 0
    values, counts = bits[there], histogram.cpu()[there].double()
    order = values.argsort(stable=True)
    return values[order], counts[order]


def rounded(values: Tensor, activations: Activations, low: float, high: float) -> Tensor:
    """`values` float64 [V] rounded with one static scale for inputs in [low, high]."""
    given = static_tensors(activations, low, high)
    made = round_inputs(values, activations, given)
    return made.values * made.scales


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


def _quantile(values: Tensor, counts: Tensor, share: float) -> float:
    """The smallest of the ascending `values` with at least `share` of the counts at or below it."""
    below = counts.cumsum(0)
    return float(values[int((below < share * float(below[-1])).sum().clamp(max=len(values) - 1))])
