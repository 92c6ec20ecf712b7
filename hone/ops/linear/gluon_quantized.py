"""Products of x with a weight of 4-bit or 8-bit codes, dequantized in registers as operands of Hopper's tensor cores.

out^T = W x^T: a warpgroup multiplies 64 rows of the weight (the A operand, from registers) with the rows of x (the B
operand): by wgmma, x from shared memory, or, where x has few rows, by mma.sync. One warp loads codes, scales and x by the
tensor memory accelerator, several stages ahead. Frantar et al. 2024 (Marlin, arXiv:2408.11743).

Shapes: x [M, K], codes int32 [N/64, K * bits/256, 128, 4], scales [G, N/16, 8, 2] (rows r and r + 8 of 16 side by side).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hone.ops.compat import tma_load, warpgroup_barrier
from hone.ops.linear.gluon_codes import dequantize, previous_kernel_done, start_next_kernel
from hone.ops.linear.shapes import QuantizedShape
from hone.ops.linear.triton_skinny import parts_of, sum_parts


@gluon.jit
def _give(
    acc, scales, bias, out, tile, column, part, M, N, stride_out, stride_part,
    TILES: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Stores a tile of sums."""
    L_ACC: gl.constexpr = acc.type.layout
    rows = tile * 64 * TILES + gl.arange(0, 64 * TILES, gl.SliceLayout(1, L_ACC))
    columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L_ACC))
    inside = rows < N
    if GROUP == 0:
        tiled = rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        acc = acc * gl.load(scales + tiled, mask=inside, other=0.0).to(gl.float32)[:, None]
    if HAS_BIAS:
        acc = acc + gl.load(bias + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = out + part.to(gl.int64) * stride_part + columns.to(gl.int64)[None, :] * stride_out + rows[:, None]
    gl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < M))


@gluon.jit
def _load_codes(
    codes_desc, scales_desc, codes_s, scales_s, bar, slot, tile, chunk, num_chunks, BYTES: gl.constexpr,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(bar, BYTES)
    stage = codes_s.index(slot)._reinterpret(gl.int32, [TILES, BITS // 2 * CHUNKS, 256], codes_desc.layout)
    for t in gl.static_range(TILES):
        row = ((tile * TILES + t) * num_chunks + chunk) * (BITS // 2)
        tma_load(codes_desc, [row, 0], bar, stage.index(t))
    if GROUP > 0:
        tma_load(scales_desc, [chunk * 64 // GROUP, tile * TILES * 32], bar, scales_s.index(slot))


@gluon.jit
def _produce(
    x_desc, codes_desc, scales_desc, x_s, codes_s, scales_s, full, empty, tile, column, first, last, num_chunks,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The loading warp: for each stage of CHUNKS chunks of 64 columns the codes of TILES x 64 rows, their scales, and x."""
    STAGES: gl.constexpr = full.type.shape[0]
    WEIGHTS: gl.constexpr = TILES * codes_desc.block_type.nbytes
    SCALES: gl.constexpr = scales_desc.block_type.nbytes if GROUP > 0 else 0
    BYTES: gl.constexpr = x_desc.block_type.nbytes + WEIGHTS + SCALES
    x_stages = x_s._reinterpret(x_desc.dtype, [STAGES, CHUNKS, x_s.type.shape[1], 64], x_desc.layout)
    if EARLY:
        for s in gl.static_range(STAGES):
            if first + s * CHUNKS < last:
                _load_codes(
                    codes_desc, scales_desc, codes_s, scales_s, full.index(s), s, tile, first + s * CHUNKS,
                    num_chunks, BYTES, BITS, CHUNKS, GROUP, TILES,
                )  # fmt: skip
    if EARLY:
        previous_kernel_done()
    step = 0
    for chunk in range(first, last, CHUNKS):
        slot = step % STAGES
        bar = full.index(slot)
        if not EARLY or step >= STAGES:
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            _load_codes(
                codes_desc, scales_desc, codes_s, scales_s, bar, slot, tile, chunk, num_chunks, BYTES, BITS, CHUNKS,
                GROUP, TILES,
            )  # fmt: skip
        tma_load(x_desc, [chunk, column, 0], bar, x_stages.index(slot))
        step += 1  # noqa: SIM113
    if EARLY:
        start_next_kernel()


@gluon.jit
def _weight(
    codes_s, scales_s, slot, i: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, TILES: gl.constexpr, FOLD: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Chunk i of a stage as the A operand."""
    GS: gl.constexpr = 2 if GROUP == 32 else 1  # groups in a chunk
    WARPS: gl.constexpr = 4 * TILES
    HALVES: gl.constexpr = BITS // 4  # a thread's 16 bytes hold 64 or 32 columns
    L_RAW: gl.constexpr = gl.BlockedLayout(
        [1, 1, HALVES, 1, 1, 1, 4], [1, 1, 1, 1, 8, 4, 1], [TILES, 1, 1, 4, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    L_WORDS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, GS, 4 // GS], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    stage = codes_s.index(slot)._reinterpret(gl.int32, [TILES, CHUNKS, HALVES, 4, 8, 4, 4], PLAIN)
    raw = stage.slice(i, 1, dim=1).load(L_RAW)
    if BITS == 4:
        words = gl.convert_layout(raw.reshape([WARPS, 8, 4, GS, 4 // GS]), L_WORDS, assert_trivial=True)
        second = words
    else:
        words, second = gl.split(raw.reshape([TILES, HALVES, 4, 8, 4, 2, 2]))
        words = words.permute((0, 2, 3, 4, 1, 5)).reshape([WARPS, 8, 4, GS, 4 // GS])
        second = second.permute((0, 2, 3, 4, 1, 5)).reshape([WARPS, 8, 4, GS, 4 // GS])
        words = gl.convert_layout(words, L_WORDS, assert_trivial=True)
        second = gl.convert_layout(second, L_WORDS, assert_trivial=True)
    pairs = words
    if GROUP > 0 and not FOLD:
        SETS: gl.constexpr = scales_s.type.shape[1] // GS
        PLAIN_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        L_PAIRS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, L_WORDS))
        scales = scales_s.index(slot)._reinterpret(gl.int32, [SETS, GS, WARPS, 8], PLAIN_3)
        mine = scales.index(i * SETS // CHUNKS).permute((1, 2, 0))
        pairs = mine.load(L_PAIRS).expand_dims(2).expand_dims(4)
    weight = dequantize(words, second, pairs, DTYPE, BITS, GROUP > 0 and not FOLD)
    return gl.convert_layout(weight, operand, assert_trivial=True)


@gluon.jit
def _row_scales(
    scales_s, slot, i: gl.constexpr, DTYPE: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr,
    rows: gl.constexpr,
):  # fmt: skip
    """The scales of chunk i of a stage in float32, [64 TILES] in the layout `rows`."""
    WARPS: gl.constexpr = 4 * TILES
    SETS: gl.constexpr = scales_s.type.shape[1]
    L_ROWS: gl.constexpr = gl.SliceLayout(
        3, gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    stage = scales_s.index(slot)._reinterpret(DTYPE, [SETS, WARPS, 8, 2], PLAIN)
    scales = stage.index(i * SETS // CHUNKS).permute((0, 2, 1)).load(L_ROWS)
    return gl.convert_layout(scales.to(gl.float32).reshape([64 * TILES]), rows, assert_trivial=True)


@gluon.jit
def _sum_folded(
    acc, x_s, codes_s, scales_s, full, empty, steps, operand: gl.constexpr, BITS: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Sums of unscaled codes, one group at a time, scaled and added to `acc`: few multiplications where x has few rows."""
    STAGES: gl.constexpr = full.type.shape[0]
    DTYPE: gl.constexpr = x_s.dtype
    PER: gl.constexpr = CHUNKS if GROUP >= 64 * CHUNKS else GROUP // 64  # chunks of a stage that share a scale
    L_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    sums = acc
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        weight = _weight(codes_s, scales_s, slot, 0, DTYPE, BITS, CHUNKS, GROUP, TILES, True, operand)
        for i in gl.static_range(CHUNKS):
            xs = x_s.index(slot * CHUNKS + i).permute((1, 0))
            token = warpgroup_mma(weight, xs, sums, use_acc=i % PER != 0, is_async=True)
            if i + 1 < CHUNKS:
                following = _weight(codes_s, scales_s, slot, i + 1, DTYPE, BITS, CHUNKS, GROUP, TILES, True, operand)
            if (i + 1) % PER == 0:
                factor = _row_scales(scales_s, slot, i, DTYPE, CHUNKS, TILES, L_ROWS)[:, None]
            sums, weight = warpgroup_mma_wait(0, deps=[token, weight])
            if (i + 1) % PER == 0:
                acc += sums * factor
            if i + 1 < CHUNKS:
                weight = following
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot))
    return acc


@gluon.jit
def _sum_scaled(
    acc, x_s, codes_s, scales_s, full, empty, steps, operand: gl.constexpr, BITS: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Sums of scaled weights: one product always overlaps the dequantization of the next weights, across stages too."""
    STAGES: gl.constexpr = full.type.shape[0]
    DTYPE: gl.constexpr = x_s.dtype
    if steps > 0:
        mbarrier.wait(full.index(0), 0)
        weight = _weight(codes_s, scales_s, 0, 0, DTYPE, BITS, CHUNKS, GROUP, TILES, False, operand)
        before = weight
        token = warpgroup_mma_init(acc)
        for step in range(steps):
            slot = step % STAGES
            for i in gl.static_range(CHUNKS):
                xs = x_s.index(slot * CHUNKS + i).permute((1, 0))
                token = warpgroup_mma(weight, xs, token, is_async=True)
                before = warpgroup_mma_wait(1, deps=[before])
                if i == 0 and step > 0:  # only here the last product of the previous stage is complete
                    warpgroup_barrier()
                    mbarrier.arrive(empty.index((step - 1) % STAGES))
                before = weight
                if i + 1 < CHUNKS:
                    weight = _weight(codes_s, scales_s, slot, i + 1, DTYPE, BITS, CHUNKS, GROUP, TILES, False, operand)
                else:
                    following = gl.minimum(step + 1, steps - 1)  # past the last stage the result is unused
                    ahead = following % STAGES
                    mbarrier.wait(full.index(ahead), (following // STAGES) & 1)
                    weight = _weight(codes_s, scales_s, ahead, 0, DTYPE, BITS, CHUNKS, GROUP, TILES, False, operand)
        acc, before = warpgroup_mma_wait(0, deps=[token, before])
    return acc


@gluon.jit
def _sum_synced(
    acc, x_s, codes_s, scales_s, full, empty, steps, BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr,
    TILES: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """The sums of `_sum_folded` or `_sum_scaled` by mma.sync, `acc` in its layout.

    A product with 8 or 16 rows of x is shorter than the wait for an asynchronous one; these products and the dequantization
    are one stream of instructions, which ptxas interleaves.
    """
    STAGES: gl.constexpr = full.type.shape[0]
    DTYPE: gl.constexpr = x_s.dtype
    L_ACC: gl.constexpr = acc.type.layout
    L_A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L_ACC, k_width=2)
    L_B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=L_ACC, k_width=2)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, L_ACC)
    PER: gl.constexpr = CHUNKS if not FOLD or GROUP >= 64 * CHUNKS else GROUP // 64  # chunks of a stage summed together
    sums = acc
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        for i in gl.static_range(CHUNKS):
            xs = x_s.index(slot * CHUNKS + i).permute((1, 0)).load(L_B)
            weight = _weight(codes_s, scales_s, slot, i, DTYPE, BITS, CHUNKS, GROUP, TILES, FOLD, L_A)
            # Each chunk's sum starts at 0, which keeps chains of dependent products short.
            product = mma_v2(weight, xs, gl.zeros_like(acc))
            sums = product if i % PER == 0 else sums + product
            if (i + 1) % PER == 0:
                if FOLD:
                    acc += sums * _row_scales(scales_s, slot, i, DTYPE, CHUNKS, TILES, L_ROWS)[:, None]
                else:
                    acc += sums
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot))
    return acc


@gluon.jit
def _consume(
    x_s, codes_s, scales_s, full, empty, scales, bias, out, tile, column, part, first, last, M, N, stride_out, stride_part,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, FOLD: gl.constexpr,
    HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiplies stage by stage and stores the sums."""
    BM: gl.constexpr = x_s.type.shape[1]
    SYNCED: gl.constexpr = BM <= 16
    L_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0] if SYNCED else [3, 0], warps_per_cta=[4 * TILES, 1],
        instr_shape=[16, 8] if SYNCED else [16, BM, 16],
    )  # fmt: skip
    L_A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L_ACC, k_width=2)
    acc = gl.zeros([64 * TILES, BM], gl.float32, L_ACC)
    steps = gl.cdiv(last - first, CHUNKS)
    if SYNCED:
        acc = _sum_synced(acc, x_s, codes_s, scales_s, full, empty, steps, BITS, CHUNKS, GROUP, TILES, FOLD)
    elif FOLD:
        acc = _sum_folded(acc, x_s, codes_s, scales_s, full, empty, steps, L_A, BITS, CHUNKS, GROUP, TILES)
    else:
        acc = _sum_scaled(acc, x_s, codes_s, scales_s, full, empty, steps, L_A, BITS, CHUNKS, GROUP, TILES)
    if EARLY:
        previous_kernel_done()
    _give(acc, scales, bias, out, tile, column, part, M, N, stride_out, stride_part, TILES, GROUP, HAS_BIAS)


@gluon.jit(do_not_specialize=["M"])
def w4_stream(
    x_desc, codes_desc, scales_desc, scales, bias, out, M, N, K, stride_out, stride_part,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
    FOLD: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr, SOON: gl.constexpr,
):  # fmt: skip
    """One tile of out^T, 64 TILES rows of the weight by all of x, over one part of K; N is padded to whole tiles.

    With GROUP 0 a row has one scale, which multiplies the sum. With parts of K, `out` is float32 [S, M, N].
    """
    if SOON:
        start_next_kernel()
    BM: gl.constexpr = x_desc.block_type.shape[1]
    tile = gl.program_id(0)
    part = gl.program_id(1)
    column = gl.program_id(2) * BM
    num_chunks = K // 64
    share = gl.cdiv(num_chunks, gl.num_programs(1) * CHUNKS) * CHUNKS
    first = part * share
    last = gl.minimum(first + share, num_chunks)
    L_X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_s = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CHUNKS, BM, 64], L_X)
    codes_s = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * BITS // 2 * CHUNKS, 256], codes_desc.layout)
    if GROUP > 0:
        box: gl.constexpr = scales_desc.block_type.shape
        scales_s = gl.allocate_shared_memory(gl.int32, [STAGES, box[0], box[1]], scales_desc.layout)
    else:
        scales_s = codes_s
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_s, codes_s, scales_s, full, empty, scales, bias, out, tile, column, part, first, last, M, N,
                    stride_out, stride_part, BITS, CHUNKS, GROUP, TILES, FOLD, HAS_BIAS, EARLY,
                ),
            ),
            (
                _produce,
                (
                    x_desc, codes_desc, scales_desc, x_s, codes_s, scales_s, full, empty, tile, column, first, last,
                    num_chunks, BITS, CHUNKS, GROUP, TILES, EARLY,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def max_registers(shape: QuantizedShape) -> int:
    """Registers per thread so that `shape.blocks` blocks fit an SM; the loading warp releases most of its own."""
    return min(240, 65536 // (128 * (shape.tiles + 1) * shape.blocks) // 8 * 8)


def quantized_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, bits: int, features: int, shape: QuantizedShape
) -> Tensor:
    """x [M, K] times tiled codes and scales, plus bias [N]: [M, N]. x's rows are 16-byte aligned."""
    rows, columns = x.shape
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    assert shape.stages > 1, "a stage is released after the first product of the next"
    chunks, tiles, split = shape.chunks, shape.tiles, shape.parts > 1
    group = 0 if len(scales) == 1 else columns // len(scales)
    wide = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    plain = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    # Chunks are the first axis: one load reads a stage's chunks, each as a tile.
    x_desc = TensorDescriptor(x, [columns // 64, rows, 64], [64, x.stride(0), 1], [chunks, shape.block_m, 64], wide)
    codes_desc = TensorDescriptor.from_tensor(codes.view(-1, 256), [bits // 2 * chunks, 256], plain)
    scales_desc = scales
    if group:
        pairs = scales.to(x.dtype).view(len(scales), -1).view(torch.int32)
        scales_desc = TensorDescriptor.from_tensor(pairs, [max(1, 64 * chunks // group), 32 * tiles], plain)
    parts = parts_of(rows, features, shape.parts, out)
    w4_stream[(triton.cdiv(features, 64 * tiles), shape.parts, triton.cdiv(rows, shape.block_m))](
        x_desc, codes_desc, scales_desc, scales, bias, parts, rows, features, columns, features, rows * features,
        BITS=bits, CHUNKS=chunks, STAGES=shape.stages, GROUP=group, TILES=tiles, FOLD=shape.fold,
        HAS_BIAS=bias is not None and not split, EARLY=shape.early, SOON=shape.soon, num_warps=4 * tiles, maxnreg=max_registers(shape), launch_pdl=shape.early,
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
