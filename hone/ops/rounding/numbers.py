"""Number formats of quantized weights: what the codes of each name mean.

A code of a table is int8: its index minus 2^(bits-1), as `hone.ops.formats.pack` takes signed codes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Number = Literal["int", "e4m3", "e5m2", "e2m1", "nf4", "fp4"]
ScaleFormat = Literal["float", "e4m3", "e8m0"]
"""The format of stored scales: the model's, e4m3 beside a global scale, or powers of two."""


class Values(NamedTuple):
    """A format whose codes are indices into a table of values."""

    values: tuple[float, ...]
    ties: Literal["down", "even"]
    """A number halfway between two values becomes the lower one, or the one of even index (IEEE 754)."""


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)

NUMBERS: dict[str, torch.dtype | Values] = {
    "int": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": Values((*_E2M1, *(-value for value in _E2M1)), "even"),
    "nf4": Values(_NF4, "down"),
    "fp4": Values((*(value / 12 for value in _FP4), *(0.0 - value / 12 for value in _FP4)), "down"),
}
"""The dtype of a format's codes, or the values of its table: e2m1 (OCP Microscaling), nf4 (QLoRA, arXiv:2305.14314),
fp4 (bitsandbytes, which divides by the largest value, and has two equal zeros)."""


def code_dtype(number: str) -> torch.dtype:
    """The dtype of one unpacked code."""
    found = NUMBERS[number]
    return torch.int8 if isinstance(found, Values) else found


def decode(codes: Tensor, number: str, dtype: torch.dtype) -> Tensor:
    """The values of codes [...] of the format, in `dtype` and without their scale."""
    found = NUMBERS[number]
    return codes.to(dtype) if isinstance(found, torch.dtype) else _rolled(found, codes.device, dtype)[codes.int()]


def nearest(steps: Tensor, number: str) -> Tensor:
    """Codes of the values of a table nearest to `steps` [...], float weights divided by their scales."""
    found = NUMBERS[number]
    assert isinstance(found, Values), f"{number} has no table of values"
    bounds, codes = _bounds(found, steps.device, steps.dtype)
    return codes[torch.bucketize(steps, bounds, out_int32=True)]


def scale_values(scales: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Scales [N, G] as numbers: those of one byte in float32, divided by the global scale ([1] or [N, 1]) if there is one."""
    if scales.dtype.itemsize > 1:
        return scales
    return scales.float() if global_scale is None else scales.float() / global_scale


@cache
def _rolled(table: Values, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values in the order of the codes 0 .. 7, -8 .. -1: a negative index counts from the end."""
    values = torch.tensor(table.values, dtype=torch.float32)
    return values.roll(-len(values) // 2).to(device, dtype)


@cache
def _bounds(table: Values, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The float32 midpoints of neighbouring values, and the code of every interval between them."""
    values = torch.tensor(table.values, dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda i: (table.values[i], math.copysign(1.0, table.values[i])))
    bounds = ((values[order[:-1]] + values[order[1:]]) / 2).to(dtype)
    if table.ties == "even":  # `bucketize` rounds ties down: the bound below is up to the next number
        below = torch.nextafter(bounds, torch.full_like(bounds, -math.inf))
        bounds = torch.where(torch.tensor(order[1:]) % 2 == 0, below, bounds)
    codes = (torch.tensor(order) - len(values) // 2).to(torch.int8)
    return bounds.to(device), codes.to(device)
