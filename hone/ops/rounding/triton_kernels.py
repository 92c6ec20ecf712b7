"""Compensated rounding of a few columns in one launch: each program holds all of them for some rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.rounding.selection import Pattern

ROWS = 16
"""Rows of a program of one warp: tiles of [64, ROWS] fit its registers, and no reduction crosses warps."""

PATTERN_ROWS = 8
"""The same where masks are chosen, which takes two tiles more."""


@triton.jit
def solve_columns(
    target,  # float32 [B, N]
    wanted,  # float32 [B, N]
    ratio,  # float32 [B, B], rows `ratio_stride` apart
    steps,  # float32 [B, N], when ROUND
    keep,  # uint8 [B, N], when KEEP
    weights,  # float32 [B], when STAY
    solved,  # int8 [B, N] codes when ROUND, else float32 values
    errors,  # float32 [B, N]
    num_rows,  # N
    num_columns,  # B <= BLOCK, a multiple of GROUP when STAY
    ratio_stride,
    low,
    high,
    ROUND: tl.constexpr,
    KEEP: tl.constexpr,
    STAY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See hone.ops.rounding.reference.solve_columns; `target` and `keep` stay as they are. STAY of every GROUP columns
    are chosen here; without a pattern STAY is 0 and GROUP is BLOCK.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = columns[:, None].to(tl.int64) * num_rows + rows[None, :]
    inside = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
    aim = tl.load(target + at, mask=inside, other=0.0)
    goal = tl.load(wanted + at, mask=inside, other=0.0)
    if ROUND:
        step = tl.load(steps + at, mask=inside, other=1.0)
    if KEEP:
        kept = tl.load(keep + at, mask=inside, other=0).to(tl.float32)
    if STAY:
        weight = tl.load(weights + columns, mask=columns < num_columns, other=0.0)
    for first in range(0, num_columns, GROUP):
        if STAY:
            group = (columns >= first) & (columns < first + GROUP)
            score = aim - goal  # becomes what the group's columns move by when all of them are free: reference.updated
            for place in tl.static_range(GROUP - 1):
                moved = tl.sum(tl.where((columns == first + place)[:, None], score, 0.0), 0)
                later = group & (columns > first + place)
                by = tl.load(ratio + (first + place) * ratio_stride + columns, mask=later, other=0.0)
                score -= by[:, None] * moved[None, :]
            score = tl.where(kept > 0, tl.abs((goal + score) * weight[:, None]), -1.0)
            larger = tl.zeros([BLOCK, ROWS], tl.int32)
            for place in tl.static_range(GROUP):
                other = tl.sum(tl.where((columns == first + place)[:, None], score, 0.0), 0)[None, :]
                tied = (other == score) & (columns < first + place)[:, None]
                larger += ((other > score) | tied).to(tl.int32)
            kept = tl.where(group[:, None] & (larger >= STAY), 0.0, kept)
        for column in range(first, tl.minimum(first + GROUP, num_columns)):
            here = (columns == column)[:, None]
            value = tl.sum(tl.where(here, aim, 0.0), 0)
            if ROUND:
                s = tl.sum(tl.where(here, step, 0.0), 0)
                code = tl.minimum(tl.maximum(tl.div_rn(value, s), low), high)
                # Round half to even, as torch does: adding and subtracting 1.5 * 2^23 leaves an integer.
                code = (code + 12582912.0) - 12582912.0
                if KEEP:
                    code = code * tl.sum(tl.where(here, kept, 0.0), 0)
                value = code * s
            else:
                value = value * tl.sum(tl.where(here, kept, 0.0), 0)
                code = value
            error = tl.sum(tl.where(here, goal, 0.0), 0) - value
            out = column * num_rows + rows
            tl.store(solved + out, code.to(solved.dtype.element_ty), mask=rows < num_rows)
            tl.store(errors + out, error, mask=rows < num_rows)
            later = (columns > column) & (columns < num_columns)
            by = tl.load(ratio + column * ratio_stride + columns, mask=later, other=0.0)
            aim += by[:, None] * error[None, :]


def launch(
    target: Tensor,
    wanted: Tensor,
    ratio: Tensor,
    steps: Tensor | None,
    low: int,
    high: int,
    keep: Tensor | None,
    pattern: Pattern | None,
    weights: Tensor | None,
    solved: Tensor,
    errors: Tensor,
) -> None:
    """Fills `solved` and `errors`; all [B, N] are contiguous. With a pattern, `keep` is given."""
    num_columns, num_rows = wanted.shape
    block = max(16, triton.next_power_of_2(num_columns))
    stay, group = (0, block) if pattern is None else pattern
    rows = ROWS if pattern is None else PATTERN_ROWS
    solve_columns[(triton.cdiv(num_rows, rows),)](
        target, wanted, ratio, steps, keep, weights, solved, errors,
        num_rows, num_columns, ratio.stride(0), float(low), float(high),
        ROUND=steps is not None, KEEP=keep is not None, STAY=stay, GROUP=group, BLOCK=block, ROWS=rows, num_warps=1,
    )  # fmt: skip
