"""Integer grids for each group of weights: scales, and zero points where they are asymmetric.

Shapes: N rows, K columns, G groups per row, g columns per group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hone.ops.formats import code_range

How = Literal["absmax", "signed", "search"]
SHRINK = [1.0 - 0.02 * step for step in range(21)]
"""Fractions of the group's largest weight that the search tries as the largest value of the grid."""
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
_NOTHING = 2.0**-12
"""A group whose scale is below this part of the median group's is next to zero."""


class Grid(NamedTuple):
    """Scales [N, G] in the dtype they are stored in, never zero, and zero points int8 [N, G]; None where symmetric."""

    scales: Tensor
    zero_points: Tensor | None = None

    def rows(self, rows: slice) -> Grid:
        """The grids of some rows."""
        return Grid(self.scales[rows], None if self.zero_points is None else self.zero_points[rows])

    def wide(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
        """Scales and zero points [N, G, 1] in `dtype`, for weights [N, G, g]; zero points 0.0 where symmetric."""
        zeros = 0.0 if self.zero_points is None else self.zero_points.to(dtype).unsqueeze(-1)
        return self.scales.to(dtype).unsqueeze(-1), zeros

    def raised(self, weights: Tensor) -> Tensor:
        """Weights [N, K] plus zero point times scale: the nearest codes are those of a symmetric grid without a zero point."""
        if self.zero_points is None:
            return weights
        steps, zeros = self.wide(weights.dtype)
        return (weights.reshape(*self.scales.shape, -1) + steps * zeros).view(weights.shape)

    def where(self, better: Tensor, other: Grid) -> Grid:
        """These grids where `better` bool [N, G], elsewhere those of `other`."""
        points = None
        if self.zero_points is not None and other.zero_points is not None:
            points = torch.where(better, self.zero_points, other.zero_points)
        return Grid(torch.where(better, self.scales, other.scales), points)


def find_grid(
    weights: Tensor,
    bits: int,
    group_size: int,
    how: How,
    dtype: torch.dtype,
    importance: Tensor | None = None,
    *,
    symmetric: bool = True,
) -> Grid:
    """The grids of weights [N, K], with scales rounded to `dtype` before weights are rounded; every grid has a zero.

    absmax: 2 max / (2^bits - 1), as in compressed-tensors; asymmetric: from the smallest weight to the largest.
    signed: the value of largest magnitude, with its sign, gets code -2^(bits-1); the scale may be negative.
    search: the best of both signs and `SHRINK`, by squared error weighted with `importance` [K] (the Hessian's diagonal);
    asymmetric: the best of `SHRINK`, applied to both ends.
    """
    columns = weights.shape[1]
    size = group_size or columns
    weighted = None if importance is None else importance.to(weights.dtype).view(1, columns // size, size)
    found = []
    for part in weights.split(chunk_rows(weights)):
        groups = part.reshape(len(part), columns // size, size)
        if not symmetric:
            found.append(_between(groups, bits, dtype, SHRINK if how == "search" else [1.0], weighted))
        elif how == "search":
            found.append(Grid(_search(groups, bits, dtype, weighted)))
        else:
            found.append(Grid(_extreme(groups, bits, dtype, signed=how == "signed")))
    return join(found)


def chunk_rows(weights: Tensor) -> int:
    """Rows of weights [N, K] to work on at once: they fit a CPU's cache and occupy a GPU."""
    return max(1, _CHUNK.get(weights.device.type, 1 << 20) // weights.shape[1])


def join(parts: Iterable[Grid]) -> Grid:
    """Grids of consecutive rows as one."""
    scales, points = zip(*parts, strict=True)
    return Grid(torch.cat(scales), None if points[0] is None else torch.cat(points))


def find_scales(
    weights: Tensor, bits: int, group_size: int, how: How, dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """The scales [N, G] of symmetric grids, see `find_grid`."""
    return find_grid(weights, bits, group_size, how, dtype, importance).scales


def _extreme(groups: Tensor, bits: int, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """Scales [n, G] that make the largest magnitude of each group [n, G, g] representable."""
    if not signed:
        return stored(groups.abs().amax(-1) * (2.0 / ((1 << bits) - 1)), dtype)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return stored(largest / code_range(bits)[0], dtype)


def _search(groups: Tensor, bits: int, dtype: torch.dtype, importance: Tensor | None) -> Tensor:
    """The candidate with the least weighted squared error for each group."""
    low, high = code_range(bits)
    end = groups.abs().amax(-1) / -low
    best = _extreme(groups, bits, dtype, signed=False)
    least = _error(groups, Grid(best), low, high, importance)
    for sign in (1.0, -1.0):
        for shrink in SHRINK:
            candidate = stored(end * (sign * shrink), dtype)
            error = _error(groups, Grid(candidate), low, high, importance)
            better = error < least
            best = torch.where(better, candidate, best)
            least = torch.where(better, error, least)
    return best


def _between(groups: Tensor, bits: int, dtype: torch.dtype, shrinks: list[float], importance: Tensor | None) -> Grid:
    """Grids from `shrink` times the smallest (or 0) to `shrink` times the largest (or 0), the best of `shrinks`."""
    low, high = code_range(bits)
    least_value, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best, least = None, None
    for shrink in shrinks:
        scales = stored((largest - least_value) * (shrink / (high - low)), dtype)
        points = zero_points(least_value * shrink, scales, low, high)
        candidate = Grid(scales, points)
        error = _error(groups, candidate, low, high, importance) if len(shrinks) > 1 else None
        if best is None:
            best, least = candidate, error
            continue
        better = error < least
        best = candidate.where(better, best)
        least = torch.where(better, error, least)
    assert best is not None
    return best


def zero_points(least: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """The zero points int8 with which `least` gets the code nearest to `low`."""
    return (low - least / scales.to(least.dtype)).round_().clamp_(low, high).to(torch.int8)


def _error(groups: Tensor, grid: Grid, low: int, high: int, importance: Tensor | None) -> Tensor:
    steps, zeros = grid.wide(groups.dtype)
    error = (groups / steps).add_(zeros).round_().clamp_(low, high).sub_(zeros).mul_(steps).sub_(groups).square_()
    if importance is not None:
        error.mul_(importance)
    return error.sum(-1)


def stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`scales` in `dtype`: 1 for all-zero groups, the nearest finite non-zero value for those that would round to zero or infinity."""
    limits = torch.finfo(dtype)
    # float16 has few exponents: its subnormal numbers are scales of small weights, with fewer bits.
    least = limits.smallest_normal * limits.eps if dtype == torch.float16 else limits.smallest_normal
    magnitude = scales.abs().clamp(min=least, max=limits.max)
    held = torch.where(scales == 0, torch.ones_like(scales), torch.where(scales < 0, -magnitude, magnitude))
    return held.to(dtype)


def float16_holds(scales: Tensor) -> bool:
    """Whether float16 has a number within 3 % of every scale, but those of zeros and of groups that are nothing beside the others."""
    size = scales.abs().flatten()
    size = size[size > _NOTHING * size.median()]
    return bool(((size >= 2.0**-20) & (size <= torch.finfo(torch.float16).max)).all())
