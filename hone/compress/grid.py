"""Scales of integer grids for each group of weights.

Shapes: N rows, K columns, G groups per row, g columns per group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hone.ops.formats import code_range

How = Literal["absmax", "signed", "search"]
SHRINK = [1.0 - 0.02 * step for step in range(21)]
"""Fractions of the group's largest weight that the search tries as the largest value of the grid."""
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}


def find_scales(
    weights: Tensor, bits: int, group_size: int, how: How, dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """Scales [N, G] in `dtype` for weights [N, K]; never zero, and rounded to `dtype` before weights are rounded.

    absmax: 2 max / (2^bits - 1), as in compressed-tensors.
    signed: the value of largest magnitude, with its sign, gets code -2^(bits-1); the scale may be negative.
    search: the best of both signs and `SHRINK`, by squared error weighted with `importance` [K] (the Hessian's diagonal).
    """
    columns = weights.shape[1]
    size = group_size or columns
    chunk = max(1, _CHUNK.get(weights.device.type, 1 << 20) // columns)
    found = []
    for part in weights.split(chunk):
        groups = part.reshape(len(part), columns // size, size)
        if how == "search":
            weighted = None if importance is None else importance.to(weights.dtype).view(1, columns // size, size)
            found.append(_search(groups, bits, dtype, weighted))
        else:
            found.append(_extreme(groups, bits, dtype, signed=how == "signed"))
    return torch.cat(found)


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
    least = _error(groups, best, low, high, importance)
    for sign in (1.0, -1.0):
        for shrink in SHRINK:
            candidate = stored(end * (sign * shrink), dtype)
            error = _error(groups, candidate, low, high, importance)
            better = error < least
            best = torch.where(better, candidate, best)
            least = torch.where(better, error, least)
    return best


def _error(groups: Tensor, scales: Tensor, low: int, high: int, importance: Tensor | None) -> Tensor:
    wide = scales.to(groups.dtype).unsqueeze(-1)
    error = (groups / wide).round_().clamp_(low, high).mul_(wide).sub_(groups).square_()
    if importance is not None:
        error.mul_(importance)
    return error.sum(-1)


def stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`scales` in `dtype`: 1 for all-zero groups, the nearest finite non-zero value for those that would round to zero or infinity."""
    limits = torch.finfo(dtype)
    magnitude = scales.abs().clamp(min=limits.tiny, max=limits.max)
    held = torch.where(scales == 0, torch.ones_like(scales), torch.where(scales < 0, -magnitude, magnitude))
    return held.to(dtype)
