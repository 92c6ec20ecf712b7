"""Compensated rounding: a matrix to integer codes, column by column, each error made up for in later columns.

Legend: N rows, K columns; matrices are transposed, so that a column is contiguous. This is the loop of GPTQ
(arXiv:2210.17323) and SparseGPT (arXiv:2301.00774) in the form of Babai's nearest plane (arXiv:2507.18553).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.rounding import reference

BLOCK = 64
"""Columns rounded in one launch; a matrix product adds the errors of all earlier columns to each block."""


def round_compensated(
    wanted: Tensor,
    steps: Tensor,
    ratio: Tensor,
    low: int,
    high: int,
    keep: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Codes int8 [K, N] of the columns `wanted` [K, N], rounded in order on grids of `steps` [K, N] between low and high.

    `ratio` [K, K] is upper triangular: the error of column i times ratio[i, j] is added to column j before it is
    rounded. Where `keep` bool [K, N] is False the code is 0, and its error is compensated like any other. Raises
    SpecError for shapes or dtypes that do not fit.
    """
    columns = len(wanted)
    fits = wanted.shape == steps.shape == (keep.shape if keep is not None else wanted.shape)
    if (
        wanted.dim() != 2
        or not fits
        or ratio.shape != (columns, columns)
        or not wanted.dtype == ratio.dtype == steps.dtype
    ):
        raise SpecError(
            f"wanted {tuple(wanted.shape)}, steps {tuple(steps.shape)}, ratio {tuple(ratio.shape)} do not fit",
            fix="give wanted, steps and keep [K, N] and ratio [K, K], all but keep of one dtype",
        )
    chosen = backend_of("round_compensated", wanted.device, backend, dtype=wanted.dtype)
    wanted, steps, ratio = wanted.contiguous(), steps.contiguous(), ratio.contiguous()
    codes = torch.empty(wanted.shape, dtype=torch.int8, device=wanted.device)
    errors = torch.empty_like(wanted)
    for start in range(0, columns, BLOCK):
        here = slice(start, min(start + BLOCK, columns))
        target = torch.addmm(wanted[here], ratio[:start, here].T, errors[:start])
        kept = None if keep is None else keep[here].contiguous()
        given = (target, wanted[here], steps[here], ratio[here, here], low, high, kept)
        if chosen == "triton":
            from hone.ops.rounding.triton_kernels import launch

            launch(*given, codes[here], errors[here])
        else:
            codes[here], errors[here] = reference.round_columns(*given)
    return codes
