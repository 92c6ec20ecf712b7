"""Compensated rounding of a few columns in one launch: each program holds all of them for some rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of a program of one warp: three tiles of [64, ROWS] fit its registers, and no reduction crosses warps."""


@triton.jit
def round_columns(
    target,  # float32 [B, N]
    wanted,  # float32 [B, N]
    steps,  # float32 [B, N]
    ratio,  # float32 [B, B], rows `ratio_stride` apart
    keep,  # uint8 [B, N], when KEEP
    codes,  # int8 [B, N]
    errors,  # float32 [B, N]
    num_rows,  # N
    num_columns,  # B <= BLOCK
    ratio_stride,
    low,
    high,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See hone.ops.rounding.reference.round_columns; `target` stays as it is."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = columns[:, None].to(tl.int64) * num_rows + rows[None, :]
    inside = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
    aim = tl.load(target + at, mask=inside, other=0.0)
    goal = tl.load(wanted + at, mask=inside, other=0.0)
    step = tl.load(steps + at, mask=inside, other=1.0)
    if KEEP:
        kept = tl.load(keep + at, mask=inside, other=0).to(tl.float32)
    for column in range(num_columns):
        here = (columns == column)[:, None]
        s = tl.sum(tl.where(here, step, 0.0), 0)
        code = tl.div_rn(tl.sum(tl.where(here, aim, 0.0), 0), s)
        code = tl.minimum(tl.maximum(code, low), high)
        # Round half to even, as torch does: adding and subtracting 1.5 * 2^23 leaves an integer.
        code = (code + 12582912.0) - 12582912.0
        if KEEP:
            code = code * tl.sum(tl.where(here, kept, 0.0), 0)
        error = tl.sum(tl.where(here, goal, 0.0), 0) - code * s
        out = column * num_rows + rows
        tl.store(codes + out, code.to(tl.int8), mask=rows < num_rows)
        tl.store(errors + out, error, mask=rows < num_rows)
        later = (columns > column) & (columns < num_columns)
        by = tl.load(ratio + column * ratio_stride + columns, mask=later, other=0.0)
        aim += by[:, None] * error[None, :]


def launch(
    target: Tensor,
    wanted: Tensor,
    steps: Tensor,
    ratio: Tensor,
    low: int,
    high: int,
    keep: Tensor | None,
    codes: Tensor,
    errors: Tensor,
) -> None:
    """Fills `codes` and `errors`; all [B, N] are contiguous."""
    num_columns, num_rows = wanted.shape
    round_columns[(triton.cdiv(num_rows, ROWS),)](
        target, wanted, steps, ratio, keep, codes, errors, num_rows, num_columns, ratio.stride(0), float(low), float(high),
        KEEP=keep is not None, BLOCK=max(16, triton.next_power_of_2(num_columns)), ROWS=ROWS, num_warps=1,
    )  # fmt: skip
