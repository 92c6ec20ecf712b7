"""The gradient of a grouped product by its weight on Hopper: sums over each expert's rows (Gluon).

One persistent kernel made as `hone.ops.moe.gluon_grouped` is: one warp loads, two warpgroups multiply. A sum leaves out the rows of a
step that belong to the next expert. Where rows lie in pieces, an expert's sum goes through its span in each. Of fp8 codes the transposes are
read, with scales of their rows.

Legend: T rows sorted by expert, E experts, N features of dy and K of x.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from hone.ops.compat import tma_load, tma_store, warpgroup_barrier
from hone.ops.descriptors import boxes
from hone.ops.dispatch import locate
from hone.ops.moe.gluon_grouped import (
    MAX_REGISTERS,
    REGISTERS,
    ROWS,
    STEP,
    Buffers,
    barriers,
    columns_of,
    multiply,
    tile_of,
)


@gluon.jit
def _span_of(starts, ends, expert, piece, PIECES: gl.constexpr, SCALED: gl.constexpr):
    """(where loads begin, rows of others before an expert's own, end of them), in `piece` of PIECES; 0: rows are not in pieces.

    Codes have rows as their last axis, along which the memory accelerator takes multiples of 16 bytes alone.
    """
    if PIECES:
        first = gl.load(starts + expert * PIECES + piece)
        end = gl.load(ends + expert * PIECES + piece)
    else:
        first = gl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = gl.load(ends + expert)
    begin = first & -16 if SCALED else first
    return begin, first - begin, end


@gluon.jit
def _load_sums(
    dy_desc, x_desc, starts, ends, mem, num_experts, tiles_m, tiles_n, PIECES: gl.constexpr, SCALED: gl.constexpr
):
    """The loading warp of `weights_product`."""
    BK: gl.constexpr = mem.a.shape[2 if SCALED else 1]
    BM: gl.constexpr = 128
    BN: gl.constexpr = mem.out.shape[2]
    BYTES: gl.constexpr = 2 * dy_desc.block_type.nbytes + x_desc.block_type.nbytes
    EACH: gl.constexpr = PIECES if PIECES else 1
    done = 0
    for t in range(gl.program_id(0), num_experts * tiles_m * tiles_n, gl.num_programs(0)):
        expert = t // (tiles_m * tiles_n)
        inside = t % (tiles_m * tiles_n)
        m = inside % tiles_m
        n = inside // tiles_m
        for piece in range(EACH):
            begin, _, end = _span_of(starts, ends, expert, piece, PIECES, SCALED)
            for k in range(gl.cdiv(end - begin, BK)):
                slot = done % mem.STAGES
                bar = mem.full.index(slot)
                mbarrier.wait(mem.empty.index(slot), ((done // mem.STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                row = begin + k * BK
                if SCALED:  # of codes the rows are the last axis
                    tma_load(dy_desc, [m * BM, row], bar, mem.a.index(2 * slot))
                    tma_load(dy_desc, [m * BM + BM // 2, row], bar, mem.a.index(2 * slot + 1))
                    tma_load(x_desc, [n * BN, row], bar, mem.b.index(slot))
                else:
                    tma_load(dy_desc, [row, m * BM], bar, mem.a.index(2 * slot))
                    tma_load(dy_desc, [row, m * BM + BM // 2], bar, mem.a.index(2 * slot + 1))
                    tma_load(x_desc, [row, n * BN], bar, mem.b.index(slot))
                done += 1


@gluon.jit
def _clear(a, before, until, SCALED: gl.constexpr):
    """Sets to 0 what a stage's part of dy, [rows, 64] or of codes [64, rows], has outside of rows `before` ... `until`."""
    plain: gl.constexpr = gl.BlockedLayout([1, 16 if SCALED else 8], [4, 8], [4, 1], [1, 0])
    if SCALED:
        bits = a._reinterpret(gl.int8, a.shape, a.layout)
        rows = gl.arange(0, a.shape[1], gl.SliceLayout(0, plain))
        kept = bits.load(plain)
        bits.store(gl.where(((rows >= before) & (rows < until))[None, :], kept, gl.zeros_like(kept)))
    else:
        rows = gl.arange(0, a.shape[0], gl.SliceLayout(1, plain))
        kept = a.load(plain)
        a.store(gl.where((rows < until)[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def _sum_weights(
    out_desc,
    dy_scales,
    x_scales,
    starts,
    ends,
    mem,
    num_experts,
    tiles_m,
    tiles_n,
    N,
    K,
    PART: gl.constexpr,
    PIECES: gl.constexpr,
    SCALED: gl.constexpr,
):
    """A multiplying warpgroup of `weights_product`: 64 rows of the weight of every tile."""
    BK: gl.constexpr = mem.a.shape[2 if SCALED else 1]
    BM: gl.constexpr = 128
    BN: gl.constexpr = mem.out.shape[2]
    EACH: gl.constexpr = PIECES if PIECES else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // mem.a.dtype.primitive_bitwidth])
    done = 0
    for t in range(gl.program_id(0), num_experts * tiles_m * tiles_n, gl.num_programs(0)):
        expert = t // (tiles_m * tiles_n)
        inside = t % (tiles_m * tiles_n)
        m = inside % tiles_m
        n = inside // tiles_m
        acc = gl.zeros([64, BN], gl.float32, layout)
        seen = 0  # steps of this tile
        for piece in range(EACH):
            begin, others, end = _span_of(starts, ends, expert, piece, PIECES, SCALED)
            for k in range(gl.cdiv(end - begin, BK)):
                slot = done % mem.STAGES
                mbarrier.wait(mem.full.index(slot), (done // mem.STAGES) & 1)
                before, until = others - k * BK, end - begin - k * BK
                if (before > 0) | (until < BK):  # rows of other experts do not belong to this sum
                    _clear(mem.a.index(2 * slot + PART), before, until, SCALED)
                    fence_async_shared()
                    warpgroup_barrier()
                acc = multiply(acc, mem, slot, PART, not SCALED, not SCALED, seen > 0)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES), pred=seen > 0)
                done += 1
                seen += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES), pred=seen > 0)
        if SCALED:
            rows = m * BM + 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, layout))
            of_dy = gl.load(dy_scales + rows, mask=rows < N, other=0.0)
            acc = acc * of_dy[:, None] * columns_of(x_scales, n * BN, K, BN, layout)[None, :]
        staged = mem.out.index(PART)
        tma.store_wait(0)
        warpgroup_barrier()
        staged.store(acc.to(mem.out.dtype))
        fence_async_shared()
        warpgroup_barrier()
        box = staged._reinterpret(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
        tma_store(out_desc, [expert, m * BM + 64 * PART, n * BN], box)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "tiles_m", "tiles_n"])
def weights_product(
    dy_desc, x_desc, out_desc, dy_scales, x_scales, starts, ends, num_experts, tiles_m, tiles_n, N, K,
    STAGES: gl.constexpr, PIECES: gl.constexpr, SCALED: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """out [E, N, K]: the sum over each expert's rows of dy [T, N] times x [T, K].

    Where SCALED both are fp8 codes of the transposes, [N, T] and [K, T], with float32 scales [N] and [K].
    """
    BN: gl.constexpr = out_desc.block_type.shape[2]
    BK: gl.constexpr = x_desc.block_type.shape[1 if SCALED else 0]
    mem = Buffers(
        gl.allocate_shared_memory(
            x_desc.dtype, [2 * STAGES, 64, BK] if SCALED else [2 * STAGES, BK, 64], dy_desc.layout
        ),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BN, BK] if SCALED else [STAGES, BK, BN], x_desc.layout),
        gl.allocate_shared_memory(out_desc.dtype, [2, 64, BN], gl.NVMMASharedLayout(128, 16, 2)),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum_weights,
                (
                    out_desc,
                    dy_scales,
                    x_scales,
                    starts,
                    ends,
                    mem,
                    num_experts,
                    tiles_m,
                    tiles_n,
                    N,
                    K,
                    0,
                    PIECES,
                    SCALED,
                ),
            ),
            (
                _sum_weights,
                (
                    out_desc,
                    dy_scales,
                    x_scales,
                    starts,
                    ends,
                    mem,
                    num_experts,
                    tiles_m,
                    tiles_n,
                    N,
                    K,
                    1,
                    PIECES,
                    SCALED,
                ),
            ),
            (_load_sums, (dy_desc, x_desc, starts, ends, mem, num_experts, tiles_m, tiles_n, PIECES, SCALED)),
        ],
        [4, 1],
        [REGS, 24],
    )


def by_weights(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """The sum over each expert's rows of dy [T, N] times x [T, K]: [E, N, K] in `dtype`, or that of x; 0 for an expert without rows.

    With `scales`, float32 [N] and [K], dy and x are fp8 codes of their transposes, [N, T] and [K, T]. With `starts` int32 [E, n] each
    expert has n spans of rows, which end at `ends` [E, n]; there are no scales then.
    """
    assert scales is None or starts is None, "codes in pieces have no kernel"
    scaled = scales is not None
    rows_axis = 1 if scaled else 0
    experts, features, columns = len(ends), dy.shape[1 - rows_axis], x.shape[1 - rows_axis]
    out = x.new_empty(experts, features, columns, dtype=dtype or x.dtype)
    if not out.numel() or not x.shape[rows_axis]:
        return out.zero_()
    width, stages = tile_of(columns)
    step = STEP * 2 // x.element_size()
    weights_product[(locate(x.device).num_sms,)](
        boxes(dy, *((64, step) if scaled else (step, 64))), boxes(x, *((width, step) if scaled else (step, width))),
        boxes(out, 1, 64, width), *(scales or (out, out)), ends if starts is None else starts, ends, experts,
        triton.cdiv(features, ROWS), triton.cdiv(columns, width), features, columns,
        STAGES=stages, PIECES=0 if starts is None else starts.shape[1], SCALED=scaled, REGS=REGISTERS, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
