"""Compensated rounding of a few columns in plain torch: the definition, and what a CPU and float64 run.

Legend: B columns, N rows; matrices are transposed, so that a column is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_columns(
    target: Tensor, wanted: Tensor, steps: Tensor, ratio: Tensor, low: int, high: int, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(codes int8 [B, N], errors [B, N]) of the columns `wanted` [B, N] on grids of `steps` [B, N].

    `target` [B, N] is `wanted` plus the compensation of earlier columns; it is overwritten. Column c is rounded to
    code = clamp(round(target / step), low, high), 0 where `keep` bool [B, N] is False; its error wanted - code * step
    times ratio[c, j] (upper triangular [B, B]) is added to the target of each later column j.
    """
    codes, errors = torch.empty_like(wanted), torch.empty_like(wanted)
    for column in range(len(wanted)):
        code = torch.div(target[column], steps[column], out=codes[column]).round_().clamp_(low, high)
        if keep is not None:
            code.mul_(keep[column])
        error = torch.addcmul(wanted[column], code, steps[column], value=-1.0, out=errors[column])
        target[column + 1 :].addr_(ratio[column, column + 1 :], error)
    return codes.to(torch.int8), errors
