"""Blocks of 128 on a GPU: a cast that reads its tensor once and writes both copies, and the product, scaled every 128 of the sum.

A tile of 128 x 128 has all that its scales depend on, so unlike scales of rows these need no pass of their own. In the product each
128 of the summed axis are added up by the tensor cores, then scaled and added to a sum in float32 registers
(DeepSeek-V3, arXiv:2412.19437, 3.3.2). Layouts are those of `hone.ops.fp8.blocks`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.fp8.blocks import BLOCK, num_blocks, scales_shape
from hone.ops.fp8.reference import TOP_EXPONENT
from hone.ops.fp8.triton_kernels import scale_bits


class Tile(NamedTuple):
    """Rows and columns of a program's part of the output, warps, stages of its pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


TILES = (Tile(128, 128, 8, 3), Tile(128, 128, 8, 4), Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))
"""Of which the fastest for a shape is found at its first call. They give the same bits: an output's sum has one order."""


@triton.jit
def cast_blocks(
    x, codes, scales, codes_t, scales_t, M, K, stride,
    SQUARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of x: its part of `codes` [M, K] where ROWS, and of `codes_t` [K, M] where COLUMNS, each with its scales."""
    across, down = tl.program_id(0), tl.program_id(1)
    rows = down * BLOCK + tl.arange(0, BLOCK)
    columns = across * BLOCK + tl.arange(0, BLOCK)
    own_rows, own_columns = rows < M, columns < K
    inside = own_rows[:, None] & own_columns[None, :]
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    by_row, by_column = tile, tile
    if SQUARE:
        found, inverse = scale_bits(tl.max(tl.max(bits, 1), 0), TOP)
        by_row = tile * inverse.to(tl.float32, bitcast=True)
        by_column = by_row
        if ROWS:
            tl.store(scales + down * tl.num_programs(0) + across, found.to(tl.float32, bitcast=True))
        if COLUMNS:
            tl.store(scales_t + across * tl.num_programs(1) + down, found.to(tl.float32, bitcast=True))
    else:
        if ROWS:
            found, inverse = scale_bits(tl.max(bits, 1), TOP)
            by_row = tile * inverse.to(tl.float32, bitcast=True)[:, None]
            tl.store(scales + across * M + rows, found.to(tl.float32, bitcast=True), mask=own_rows)
        if COLUMNS:
            found, inverse = scale_bits(tl.max(bits, 0), TOP)
            by_column = tile * inverse.to(tl.float32, bitcast=True)[None, :]
            tl.store(scales_t + down * K + columns, found.to(tl.float32, bitcast=True), mask=own_columns)
    if ROWS:
        places = codes + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(places, by_row.to(codes.dtype.element_ty), mask=inside)
    if COLUMNS:
        turned = tl.trans(by_column.to(codes_t.dtype.element_ty))
        places = codes_t + columns.to(tl.int64)[:, None] * M + rows[None, :]
        tl.store(places, turned, mask=own_columns[:, None] & own_rows[None, :])


@triton.jit
def block_sums(
    a, a_scales, b, b_scales, bias, out, M, N, K,
    SQUARE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of out = a b^T; BLOCK_N divides 128, so that a tile lies in one row of a weight's blocks.

    EVEN: 128 divides K. TOGETHER: rows of tiles whose programs run after each other, so that they share what they read of b.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program, group = tl.program_id(0), TOGETHER * tiles_n
    first = program // group * TOGETHER
    count = tl.minimum(tiles_m - first, TOGETHER)
    tile_m, tile_n = first + program % group % count, program % group // count
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    # Rows past the end are read again from the last one, and not stored.
    a_rows = a + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K + ks[None, :]
    b_rows = b + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K + ks[:, None]
    a_scales += tl.minimum(rows, M - 1)
    blocks = tl.cdiv(K, 128)
    b_scales += tile_n * BLOCK_N // 128 * blocks if SQUARE else tl.minimum(columns, N - 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, blocks):
        start = block * 128
        if EVEN:
            left, right = tl.load(a_rows + start), tl.load(b_rows + start)
        else:
            inside = start + ks < K
            left = tl.load(a_rows + start, mask=inside[None, :], other=0.0)
            right = tl.load(b_rows + start, mask=inside[:, None], other=0.0)
        piece = tl.dot(left, right, out_dtype=tl.float32)
        by_row = tl.load(a_scales + block * M)
        if SQUARE:
            total += piece * (by_row * tl.load(b_scales + block))[:, None]
        else:
            by_column = tl.load(b_scales + block * N)
            total += piece * by_row[:, None] * by_column[None, :]
    own_columns = columns < N
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=own_columns, other=0.0).to(tl.float32)[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & own_columns[None, :])


def cast(
    x: Tensor, dtype: torch.dtype, *, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [M, K], scales, transposed codes [K, M], their scales) of x [M, K] with contiguous rows; empty where not asked for."""
    num_rows, width = x.shape
    codes = torch.empty((num_rows, width) if rows else (0,), dtype=dtype, device=x.device)
    codes_t = torch.empty((width, num_rows) if columns else (0,), dtype=dtype, device=x.device)
    shape, turned = scales_shape(num_rows, width, square=square), scales_shape(width, num_rows, square=square)
    scales = torch.empty(shape if rows else (0,), dtype=torch.float32, device=x.device)
    scales_t = torch.empty(turned if columns else (0,), dtype=torch.float32, device=x.device)
    if x.numel():
        cast_blocks[(num_blocks(width), num_blocks(num_rows))](
            x, codes, scales, codes_t, scales_t, num_rows, width, x.stride(0),
            SQUARE=square, ROWS=rows, COLUMNS=columns, TOP=TOP_EXPONENT[dtype], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return codes, scales, codes_t, scales_t


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *,
    square: bool, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """As `blocks.block_product`, with `tile`; None: the fastest of `TILES`."""
    (rows, width), columns = a.shape, len(b)
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    how: dict[str, Any] = {"SQUARE": square, "HAS_BIAS": bias is not None, "EVEN": width % BLOCK == 0, "TOGETHER": 8}
    given = (a, a_scales, b, b_scales, bias, out, rows, columns, width)
    if tile is None:
        _tuned()[lambda at: (triton.cdiv(rows, at["BLOCK_M"]) * triton.cdiv(columns, at["BLOCK_N"]),)](*given, **how)
        return out
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),)
    how |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.warps, "num_stages": tile.stages}
    block_sums[grid](*given, **how)
    return out


@cache
def _tuned() -> Any:
    """The kernel of which Triton times `TILES` for each shape; made late, since the interpreter has nothing to time."""
    configs = [
        triton.Config({"BLOCK_M": one.block_m, "BLOCK_N": one.block_n}, num_warps=one.warps, num_stages=one.stages)
        for one in TILES
    ]
    return triton.autotune(configs=configs, key=["M", "N", "K", "SQUARE"])(block_sums)
