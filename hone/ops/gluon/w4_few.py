"""Products of a few rows with a weight of 4-bit codes: no ring of stages, every warp streams codes by itself.

With so few rows a product ends in about ten microseconds, and waits on stages and on whole warpgroups are a third of it
(hone.ops.gluon.w4). Here the warps of a block share out the columns of 16 ROWS rows of the weight: each reads 16 bytes of
codes a thread straight into registers, DEPTH units ahead, and multiplies by itself with mma.m16n8k16, whose A operand is
what `formats.tile_codes` keeps together. A group's sum is taken from bare codes, then scaled; the warps' sums are added
in a fixed order. Frantar et al. 2024 (Marlin, arXiv:2408.11743) stream the same way, over a ring in shared memory.

Shapes: x [M, K], codes int32 [N/64, K/64, 128, 4], scales [G, N/16, 8, 2] (rows r and r + 8 of 16 side by side).
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hone.ops.gemm_shapes import FewShape
from hone.ops.gluon.w4_codes import dequantize, previous_kernel_done, start_next_kernel

MOST_ROWS = 8
"""Rows of x that one product takes: the N of mma.m16n8k16."""


@gluon.jit
def _load(
    codes, scales, tile, step, num_chunks, stride_group,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr,
    L_WORDS: gl.constexpr, L_ROWS: gl.constexpr,
):  # fmt: skip
    """The words [WARPS, 8, 4, CHUNKS, 4] and scales [SPLITS, 16 ROWS] of a step; zeros past the last chunk."""
    L_5: gl.constexpr = L_WORDS
    warp = gl.arange(0, SPLITS * ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L_5)))))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L_5)))))
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L_5)))))
    one = gl.arange(0, CHUNKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L_5)))))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L_5)))))
    sixteen = tile * ROWS + warp % ROWS
    chunk = ((step * SPLITS + warp // ROWS) * CHUNKS)[:, None, None, None, None] + one[None, None, None, :, None]
    place = (sixteen // 4 * num_chunks * 512 + sixteen % 4 * 128)[:, None, None, None, None] + chunk * 512
    lane = row[None, :, None, None, None] * 16 + pair[None, None, :, None, None] * 4 + word[None, None, None, None, :]
    words = gl.load(codes + (place + lane), mask=chunk < num_chunks, other=0)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, L_ROWS))
    if GROUP > 0:
        rows = gl.arange(0, 16 * ROWS, gl.SliceLayout(0, L_ROWS))
        first = (step * SPLITS + split) * CHUNKS
        tiled = tile * 16 * ROWS + rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        places = scales + (first * 64 // GROUP * stride_group)[:, None] + tiled[None, :]
        factor = gl.load(places, mask=(first < num_chunks)[:, None], other=0.0)
    else:
        factor = split[:, None]
    return words, factor


@gluon.jit(do_not_specialize=["M"])
def w4_few(
    x, codes, scales, bias, out, M, N, num_chunks, x_rows, stride_group,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, EARLY: gl.constexpr, SOON: gl.constexpr,
):  # fmt: skip
    """16 ROWS rows of out^T. Rows of x are 8 `x_rows` numbers apart; a group's scales `stride_group`."""
    L_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SPLITS, ROWS, 1], instr_shape=[1, 16, 8]
    )
    L_A: gl.constexpr = gl.DotOperandLayout(0, L_ACC, 2)
    L_B: gl.constexpr = gl.DotOperandLayout(1, L_ACC, 2)
    L_WORDS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, CHUNKS, 4], [1, 8, 4, 1, 1], [SPLITS * ROWS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    L_ROWS: gl.constexpr = gl.SliceLayout(2, L_ACC)
    DTYPE: gl.constexpr = x.dtype.element_ty
    tile = gl.program_id(0)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, L_B)))
    k = gl.arange(0, 64 * CHUNKS, gl.SliceLayout(0, gl.SliceLayout(2, L_B)))
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L_B)))
    chunk = (split * CHUNKS)[:, None] + (k // 64)[None, :]
    places = x + ((split * CHUNKS * 64)[:, None] + k[None, :])[:, :, None] + column[None, None, :] * (x_rows * 8)
    mine = column[None, None, :] < M
    steps = gl.cdiv(num_chunks, SPLITS * CHUNKS)
    ahead = ()
    for d in gl.static_range(DEPTH):
        brought = _load(codes, scales, tile, d, num_chunks, stride_group, SPLITS, ROWS, CHUNKS, GROUP, L_WORDS, L_ROWS)
        ahead = ahead + (brought,)  # noqa: RUF005 (the compiler knows no starred tuples)
    if SOON:
        start_next_kernel()
    if EARLY:
        previous_kernel_done()
    acc = gl.zeros([SPLITS, 16 * ROWS, 8], gl.float32, L_ACC)
    for step in range(0, steps, DEPTH):
        for d in gl.static_range(DEPTH):
            now = step + d
            inside = (now * SPLITS * CHUNKS + chunk) < num_chunks
            xs = gl.load(places + now * (SPLITS * CHUNKS * 64), mask=mine & inside[:, :, None], other=0.0)
            words, factor = ahead[d]
            bare = dequantize(words, words, words, DTYPE, 4, False)
            bare = gl.convert_layout(bare.reshape([SPLITS, 16 * ROWS, 64 * CHUNKS]), L_A, assert_trivial=True)
            following = _load(
                codes, scales, tile, now + DEPTH, num_chunks, stride_group, SPLITS, ROWS, CHUNKS, GROUP, L_WORDS, L_ROWS
            )
            ahead = ahead[:d] + (following,) + ahead[d + 1 :]  # noqa: RUF005
            if GROUP > 0:
                sums = mma_v2(bare, xs, gl.zeros([SPLITS, 16 * ROWS, 8], gl.float32, L_ACC))
                acc += sums * factor.to(gl.float32)[:, :, None]
            else:
                acc = mma_v2(bare, xs, acc)
    if EARLY and not SOON:
        start_next_kernel()
    _give(gl.sum(acc, 0), scales, bias, out, tile, M, N, ROWS, GROUP, HAS_BIAS)


@gluon.jit
def _give(total, scales, bias, out, tile, M, N, ROWS: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Stores sums [16 ROWS, 8], scaled where a row has one scale."""
    rows = tile * 16 * ROWS + gl.arange(0, 16 * ROWS, gl.SliceLayout(1, total.type.layout))
    columns = gl.arange(0, 8, gl.SliceLayout(0, total.type.layout))
    inside = rows < N
    if GROUP == 0:
        tiled = rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        total *= gl.load(scales + tiled, mask=inside, other=0.0).to(gl.float32)[:, None]
    if HAS_BIAS:
        total += gl.load(bias + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = out + columns[None, :] * N + rows[:, None]
    gl.store(places, total.to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < M))


def few_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, features: int, shape: FewShape
) -> Tensor:
    """x [M, K] (M <= 8) times tiled codes and scales, plus bias [N]: [M, N]. x's rows are 16-byte aligned."""
    rows, columns = x.shape
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    group = 0 if len(scales) == 1 else columns // len(scales)
    scales = scales if group == 0 else scales.to(x.dtype)
    warps = shape.splits * shape.rows
    w4_few[(triton.cdiv(features, 16 * shape.rows),)](
        x, codes, scales, bias, out, rows, features, columns // 64, x.stride(0) // 8, scales.stride(0),
        SPLITS=shape.splits, ROWS=shape.rows, CHUNKS=shape.chunks, DEPTH=shape.depth, GROUP=group,
        HAS_BIAS=bias is not None, EARLY=True, SOON=shape.soon, num_warps=warps, maxnreg=max_registers(shape), launch_pdl=True,
    )  # fmt: skip
    return out


def max_registers(shape: FewShape) -> int:
    """Registers a thread so that `shape.blocks` blocks fit an SM."""
    return min(240, 65536 // (32 * shape.splits * shape.rows * shape.blocks) // 8 * 8)
