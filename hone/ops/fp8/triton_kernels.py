"""The casts of fp8 training in two passes: largest magnitudes of rows and columns, then both copies from one read.

A product of codes needs its factors with the summed axis last. x is summed over its features in the forward pass and over its
rows in the weight's gradient, so it is cast twice, once transposed, each time with the scales of the axis that stays.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.fp8.recipes import MULTIPLE
from hone.ops.fp8.reference import TOP_EXPONENT

BLOCK = 128
"""Rows and columns of a tile: 128 bytes of codes a row, in either direction."""


@triton.jit
def largest_magnitudes(
    x, rows_max, columns_max, M, K, stride, apart,
    TENSORWISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix of a stack, which are `apart` numbers from each other: its maxima, as bits of float32, into those of all
    (int32, zero before)."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * apart
    if not TENSORWISE:
        rows_max += matrix * M
        columns_max += matrix * K
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    bits = tile.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    of_rows = tl.max(bits, 1)
    if TENSORWISE:
        tl.atomic_max(rows_max, tl.max(of_rows, 0), sem="relaxed")
    else:
        tl.atomic_max(rows_max + rows, of_rows, mask=rows < M, sem="relaxed")
        tl.atomic_max(columns_max + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


@triton.jit
def scale_bits(largest, TOP: tl.constexpr):
    """(the bits of the scale, those of its inverse): see `reference.scales_of`."""
    exponent = (largest >> 23) - TOP + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return tl.where(largest >= 0x7F800000, 0x7FC00000, exponent << 23), (254 - exponent) << 23


@triton.jit
def cast_tile(
    x, rows_max, columns_max, codes, scales, codes_t, scales_t, M, K, stride, apart, width_t,
    TENSORWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix of x: its part of `codes` [..., M, K] where ROWS, and of `codes_t` [..., K, width_t] where COLUMNS."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * apart
    codes += matrix * M * K
    codes_t += matrix * K * width_t
    if not TENSORWISE:
        rows_max += matrix * M
        columns_max += matrix * K
        scales += matrix * M
        scales_t += matrix * K
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    own_rows, own_columns = rows < M, columns < K
    inside = own_rows[:, None] & own_columns[None, :]
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        if TENSORWISE:
            found, inverse = scale_bits(tl.load(rows_max), TOP)
            by_row = tile * inverse.to(tl.float32, bitcast=True)
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(scales, found.to(tl.float32, bitcast=True))
        else:
            found, inverse = scale_bits(tl.load(rows_max + rows, mask=own_rows, other=0), TOP)
            by_row = tile * inverse.to(tl.float32, bitcast=True)[:, None]
            if tl.program_id(0) == 0:
                tl.store(scales + rows, found.to(tl.float32, bitcast=True), mask=own_rows)
        places = codes + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(places, by_row.to(codes.dtype.element_ty), mask=inside)
    if COLUMNS:
        if TENSORWISE:
            found, inverse = scale_bits(tl.load(columns_max), TOP)
            by_column = tile * inverse.to(tl.float32, bitcast=True)
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(scales_t, found.to(tl.float32, bitcast=True))
        else:
            found, inverse = scale_bits(tl.load(columns_max + columns, mask=own_columns, other=0), TOP)
            by_column = tile * inverse.to(tl.float32, bitcast=True)[None, :]
            if tl.program_id(1) == 0:
                tl.store(scales_t + columns, found.to(tl.float32, bitcast=True), mask=own_columns)
        turned = tl.trans(by_column.to(codes_t.dtype.element_ty))
        places = codes_t + columns.to(tl.int64)[:, None] * width_t + rows[None, :]
        tl.store(places, turned, mask=own_columns[:, None] & own_rows[None, :])


def maxima(x: Tensor, tensorwise: bool) -> tuple[Tensor, Tensor]:
    """As `reference.maxima`, in one pass over x [..., M, K] with contiguous rows."""
    x, grid, apart = _stacked(x)
    *stack, rows, columns = x.shape
    found = torch.zeros(1 if tensorwise else math.prod(stack) * (rows + columns), dtype=torch.int32, device=x.device)
    if tensorwise:
        of_rows, of_columns = found, found
    else:
        cut = math.prod(stack) * rows
        of_rows, of_columns = found[:cut].view(*stack, rows), found[cut:].view(*stack, columns)
    if x.numel():
        largest_magnitudes[grid](
            x, of_rows, of_columns, rows, columns, x.stride(-2), apart,
            TENSORWISE=tensorwise, BLOCK_M=BLOCK, BLOCK_K=BLOCK, num_warps=8,
        )  # fmt: skip
    return of_rows, of_columns


def cast(
    x: Tensor, largest: tuple[Tensor, Tensor], dtype: torch.dtype, tensorwise: bool, *, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [..., M, K], scales, transposed codes [..., K, M], their scales) of x [..., M, K]; those that are not asked for are empty.

    The memory of transposed codes begins each row at a multiple of 16 bytes, as products read it.
    """
    x, grid, apart = _stacked(x)
    *stack, num_rows, num_columns = x.shape
    width_t = -(-num_rows // MULTIPLE) * MULTIPLE
    make = {"device": x.device}
    codes = torch.empty((*stack, num_rows, num_columns) if rows else (0,), dtype=dtype, **make)
    codes_t = torch.empty((*stack, num_columns, width_t) if columns else (0,), dtype=dtype, **make)
    scales = torch.empty(((1,) if tensorwise else (*stack, num_rows)) if rows else 0, dtype=torch.float32, **make)
    scales_t = torch.empty(
        ((1,) if tensorwise else (*stack, num_columns)) if columns else 0, dtype=torch.float32, **make
    )
    if x.numel():
        cast_tile[grid](
            x, *largest, codes, scales, codes_t, scales_t, num_rows, num_columns, x.stride(-2), apart, width_t,
            TENSORWISE=tensorwise, ROWS=rows, COLUMNS=columns, TOP=TOP_EXPONENT[dtype],
            BLOCK_M=BLOCK, BLOCK_K=BLOCK, num_warps=8,
        )  # fmt: skip
    return codes, scales, codes_t[..., :num_rows] if columns else codes_t, scales_t


def _stacked(x: Tensor) -> tuple[Tensor, tuple[int, int, int], int]:
    """(x, the programs of its tiles, numbers between its matrices)."""
    if x.dim() > 2:
        x = x.contiguous()
    *stack, rows, columns = x.shape
    return x, (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK), math.prod(stack)), rows * x.stride(-2)
