"""The integer grid on which weights lie already: found from the weights, exactly.

Shapes: N rows, K columns, G groups per row, g columns per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.formats import code_range
from hone.ops.rounding.integer_grid import Grid

_DIGITS = 24
"""Binary digits of a float32 number."""


def grid_of(weights: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> Grid | None:
    """The symmetric grids, with scales in `dtype`, of which every weight [N, K] (float32) is a point; None where there are none.

    A scale is the greatest common divisor of its group, or an integral part of it that `dtype` holds. With codes of b bits and scales
    of d digits a weight has b + d digits at most, so that float32 has points of grids of float16 and bfloat16 scales exactly.
    """
    size = group_size or weights.shape[1]
    groups = weights.double().reshape(len(weights), -1, size)
    largest = groups.abs().amax(-1)
    units = torch.exp2(torch.where(largest > 0, largest, 1.0).log2().floor() - (_DIGITS - 1))
    whole = groups / units[..., None]
    if not bool((whole == whole.round()).all()):
        return None
    divisors = _common_divisor(whole.to(torch.int64)) * units
    low, high = code_range(bits)
    found = torch.zeros_like(divisors)
    found[largest == 0] = 1
    for part in range(1, -low + 1):
        candidate = (divisors / part).to(dtype).double()
        steps = torch.where(candidate > 0, candidate, 1.0)[..., None]
        codes = groups / steps
        fits = ((codes.round() * steps == groups) & (codes.round() >= low) & (codes.round() <= high)).all(-1)
        found = torch.where((found == 0) & fits & (candidate > 0), candidate, found)
    return None if bool((found == 0).any()) else Grid(found.to(dtype))


def _common_divisor(numbers: Tensor) -> Tensor:
    """The greatest common divisor of int64 numbers [..., g]; [...]."""
    while numbers.shape[-1] > 1:
        half = (numbers.shape[-1] + 1) // 2
        first, second = (
            numbers[..., :half],
            torch.nn.functional.pad(numbers[..., half:], (0, 2 * half - numbers.shape[-1])),
        )
        numbers = torch.gcd(first, second)
    return numbers[..., 0]
