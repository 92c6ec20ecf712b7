"""Blocks of 128 in plain torch: codes, scales and products as DeepSeek-V3 trains with them; the definition, and the path of CPUs.

DeepSeek-AI 2024, arXiv:2412.19437, section 3.3: a factor of activations or gradients has a scale for each tile of 1 x 128 along the
summed axis, a weight one for each block of 128 x 128, and the sums of 128 products are added up in float32. The last tile or block
of an axis may be smaller. Scales are powers of two, so that a weight's block has the same codes in both directions.

Layouts, those that cuBLAS reads: scales of tiles are [K / 128, M] for codes [M, K], one row for each 128 of the summed axis;
scales of blocks are [N / 128, K / 128] for codes [N, K]; divisions round up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.fp8.reference import scales_of

BLOCK = 128
"""Numbers of a tile along the summed axis, and rows and columns of a weight's block."""


def num_blocks(size: int) -> int:
    """Blocks of an axis of `size` numbers; the last one may be smaller."""
    return -(-size // BLOCK)


def scales_shape(rows: int, width: int, *, square: bool) -> tuple[int, int]:
    """Of the scales of codes [rows, width] whose summed axis is the last one; `square`: a weight's."""
    return (num_blocks(rows), num_blocks(width)) if square else (num_blocks(width), rows)


def block_codes(x: Tensor, dtype: torch.dtype, *, square: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """(codes [M, K], scales) of x [M, K]; with `columns` of its transpose, codes [K, M] with tiles along M.

    `square`: one scale for 128 x 128, else for 1 x 128. Scales as `reference.scales_of` has them; NaN where a number of the block is
    not finite. Rounded to nearest, half to even.
    """
    wide = x.detach().float()
    wide = wide.t() if columns else wide
    rows, width = wide.shape
    high = BLOCK if square else 1
    tiles = F.pad(wide, (0, -width % BLOCK, 0, -rows % high)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, high))
    largest = (tiles.view(torch.int32) & 0x7FFFFFFF).amax((1, 3))
    scales, inverse = scales_of(largest, dtype)
    codes = (tiles * inverse[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :width]
    return codes.to(dtype).contiguous(), (scales if square else scales.t()).contiguous()


def decoded(codes: Tensor, scales: Tensor, *, square: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [M, K] that codes [M, K] and their scales stand for, which float32 has exactly."""
    rows, width = codes.shape
    by_tile = scales.repeat_interleave(BLOCK, 0)[:rows] if square else scales.t()
    return codes.to(dtype) * by_tile.repeat_interleave(BLOCK, 1)[:, :width].to(dtype)


def block_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *,
    square: bool, sums: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Codes a [M, K] in tiles times codes b [N, K] transposed, plus bias [N]: [M, N] in `dtype`, summed in `sums`.

    `square`: b is a weight, else it has tiles too.
    """
    out = F.linear(
        decoded(a, a_scales, square=False, dtype=sums), decoded(b, b_scales, square=square, dtype=sums)
    )  # fmt: skip
    return (out if bias is None else out + bias.to(sums)).to(dtype)
