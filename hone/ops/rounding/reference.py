"""Compensated rounding of a few columns in plain torch: the definition, and what a CPU and float64 run.

Legend: B columns, N rows; matrices are transposed, so that a column is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.rounding.selection import Pattern, largest_of_group


def solve_columns(
    target: Tensor,
    wanted: Tensor,
    ratio: Tensor,
    steps: Tensor | None,
    low: int,
    high: int,
    keep: Tensor | None,
    pattern: Pattern | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(codes int8 [B, N], or values where `steps` is None, and errors [B, N]) of the columns `wanted` [B, N].

    `target` [B, N] is `wanted` plus the compensation of earlier columns; it is overwritten. Column c is rounded to
    code = clamp(round(target / step), low, high) on grids of `steps` [B, N], or keeps its target as its value where that is
    None; both are 0 where `keep` bool [B, N] is False. Its error wanted - value times ratio[c, j] (upper triangular
    [B, B]) is added to the target of each later column j. With `pattern`, `keep` is overwritten too: before the first
    of every group of columns, those with the largest |target * weights| [B] among the kept ones stay.
    """
    result, errors = torch.empty_like(wanted), torch.empty_like(wanted)
    for column in range(len(wanted)):
        if pattern is not None and column % pattern.group == 0:
            group = slice(column, column + pattern.group)
            free = updated(target[group], wanted[group], ratio[group, group])
            scores = (free * weights[group, None]).abs_().masked_fill_(~keep[group], -1.0)
            keep[group] &= largest_of_group(scores, pattern.stay)
        if steps is None:
            torch.mul(target[column], keep[column], out=result[column])
            error = torch.sub(wanted[column], result[column], out=errors[column])
        else:
            code = torch.div(target[column], steps[column], out=result[column]).round_().clamp_(low, high)
            if keep is not None:
                code.mul_(keep[column])
            error = torch.addcmul(wanted[column], code, steps[column], value=-1.0, out=errors[column])
        target[column + 1 :].addr_(ratio[column, column + 1 :], error)
    return result if steps is None else result.to(torch.int8), errors


def updated(target: Tensor, wanted: Tensor, ratio: Tensor) -> Tensor:
    """The columns [B, N] that make up for the errors of earlier ones together, with `target` as for `solve_columns`.

    A target assumes that the columns between keep their values; these, none of which is decided, all move.
    """
    return wanted + torch.linalg.solve_triangular(ratio.T, target - wanted, upper=False, unitriangular=True)
