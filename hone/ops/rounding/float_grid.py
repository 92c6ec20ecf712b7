"""Scales of one byte for groups of 4- and 8-bit floats: from the largest weight, or searched for the least squared error.

Shapes: N rows, K columns, G groups per row, g columns per group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hone.ops.rounding.inputs import LARGEST, local_scales, power_scales, round_number
from hone.ops.rounding.numbers import scale_values

How = Literal["absmax", "search"]
STEPS = {torch.float8_e4m3fn: range(-6, 6), torch.float8_e8m0fnu: range(-1, 2)}
"""Scales that a search tries, as numbers of their format below and above that of the largest weight: for e4m3 from about 0.6
to 1.5 times (which makes the largest weight 4, not 6, as in arXiv:2512.02010), for e8m0 half and twice."""
_LARGEST_CODE = {torch.float8_e4m3fn: 126, torch.float8_e8m0fnu: 254}
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}


def global_scale_of(weights: Tensor) -> Tensor:
    """NVFP4's divisor float32 [1]: it makes the scale of the group with the largest weight the largest e4m3 number."""
    largest = weights.abs().amax().float()
    found = LARGEST["e4m3"] * LARGEST["e2m1"] / largest
    return torch.where(torch.isfinite(found), found, torch.ones_like(found)).view(1)


def find_scales(
    weights: Tensor,
    number: str,
    group_size: int,
    how: How,
    *,
    divisor: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """Scales [N, G] of groups of weights [N, K] that are rounded to `number`.

    With the global scale `divisor` [1] of NVFP4 float8_e4m3fn, without one the powers of two of MX formats, float8_e8m0fnu.
    search: the best of `STEPS`, by squared error weighted with `importance` [K] (the Hessian's diagonal).
    """
    columns, found = weights.shape[1], []
    weighted = None if importance is None else importance.to(weights.dtype).view(1, columns // group_size, group_size)
    for part in weights.split(max(1, _CHUNK.get(weights.device.type, 1 << 18) // columns)):
        groups = part.reshape(len(part), columns // group_size, group_size)
        largest = groups.abs().amax(-1)
        scales = power_scales(largest, number) if divisor is None else local_scales(largest, divisor)
        if how == "search":
            scales = _search(groups, scales, number, divisor, weighted)
        found.append(scales.view(torch.uint8))
    return torch.cat(found).view(torch.float8_e8m0fnu if divisor is None else torch.float8_e4m3fn)


def _search(groups: Tensor, scales: Tensor, number: str, divisor: Tensor | None, importance: Tensor | None) -> Tensor:
    """The scale of least weighted squared error for each group of [n, G, g]; of equal ones that of the largest weight."""
    kind, first = scales.dtype, scales.view(torch.uint8)
    best, least = first, _error(groups, scales, number, divisor, importance)
    for step in STEPS[kind]:
        codes = (first.int() + step).clamp(1, _LARGEST_CODE[kind]).to(torch.uint8)
        error = _error(groups, codes.view(kind), number, divisor, importance)
        better = error < least
        best, least = torch.where(better, codes, best), torch.where(better, error, least)
    return best.view(kind)


def _error(groups: Tensor, scales: Tensor, number: str, divisor: Tensor | None, importance: Tensor | None) -> Tensor:
    wide = scale_values(scales, divisor).to(groups.dtype).unsqueeze(-1)
    steps = (groups / wide).clamp_(-LARGEST[number], LARGEST[number])
    error = round_number(steps, number).mul_(wide).sub_(groups).square_()
    return (error if importance is None else error.mul_(importance)).sum(-1)
