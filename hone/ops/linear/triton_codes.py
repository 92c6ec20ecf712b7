"""Rows of x as 8-bit codes, one scale for each row or for 128 columns: one pass over memory.

Shapes: x [M, K]; codes [M, K]; scales float32 [M, G], G groups of K / G columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_codes(
    x, fixed, codes, scales, stride_x, K, width, low, high, span,
    FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's group of `width` columns a program, at most BLOCK of them at a time."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    begin = group * width
    if FIXED:
        scale = tl.load(fixed)
    else:
        peak = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(x + row * stride_x + begin + at, mask=at < width, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.abs(values))
        scale = tl.div_rn(tl.max(peak, 0), span)
        scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    kind: tl.constexpr = codes.dtype.element_ty
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * stride_x + begin + at, mask=at < width, other=0.0).to(tl.float32)
        steps = tl.div_rn(values, scale + tl.zeros([BLOCK], tl.float32))
        steps = tl.minimum(tl.maximum(steps, low), high)
        if kind == tl.int8:
            steps = (steps + 12582912.0) - 12582912.0  # to the nearest integer, half to even
        tl.store(codes + row * K + begin + at, steps.to(kind), mask=at < width)


def launch_codes(
    x: Tensor, dtype: torch.dtype, width: int, limits: tuple[float, float, float], fixed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(codes [M, K], scales [M, K / width]) of x [M, K] with contiguous rows; `limits`: least and largest code, and the
    number that a group's largest magnitude becomes. `fixed` float32 [1]: the scale of all."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, columns // width, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(width))
    if rows:
        row_codes[(rows, columns // width)](
            x, x if fixed is None else fixed, codes, scales, x.stride(0), columns, width, *limits,
            FIXED=fixed is not None, BLOCK=block, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return codes, scales
