"""Products of many tokens per expert on Hopper: one warp loads by TMA, two warpgroups multiply 64 rows each (Gluon).

A persistent kernel, `rows_product`, for x W^T and for its gradient by x, whose tiles are rows of one expert; the gradient by W is
`hone.ops.moe.gluon_grouped_sums`. Nothing is padded: a tile that reaches beyond its expert's rows computes them for nothing and does not
store them. While a tile is written to memory, in the
background by TMA, the next one is multiplied.

Factors are of 16 bits, or fp8 codes with scales of their rows, whose last axis is the one that is summed.

Legend: T rows sorted by expert, E experts, F features of the product, R features or rows that are summed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hone.ops.compat import aggregate, tma_load, tma_store, warpgroup_barrier
from hone.ops.descriptors import boxes
from hone.ops.dispatch import locate

ROWS, STEP = 128, 64
"""A tile's rows, and how much of the sum a stage holds."""

SPAN = 4
"""Tiles of rows that run beside each other through all features, so that both operands stay in the L2 cache."""

REGISTERS, MAX_REGISTERS = 240, 168
"""Registers per thread of a multiplying warpgroup, and the resulting average over all threads."""

_Memory = gl._core.shared_memory_descriptor


@triton.jit
def list_tiles(
    starts,  # int32 [E, n], unused where PIECES is 0
    ends,  # int32 [E], or [E, n]
    tiles,
    num_rows,
    num_experts,
    most,
    SPANS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """tiles int32 [most + 1, 3]: (expert, first row, end of the expert's rows) of each tile of rows; the last one: how many there are.

    Rows of an expert are a span that begins where the one before ends, or PIECES n > 0 spans with starts of their own, one in each of n
    pieces of rows. Of a span after which nobody's rows come, the end is moved up to a whole STEP of rows: sums over rows read so far,
    and multiply what they read there by 0, for which it must have been written.
    """
    each: tl.constexpr = PIECES if PIECES else 1
    spans = tl.arange(0, SPANS)
    known = spans < num_experts * each
    end = tl.load(ends + spans, mask=known, other=0)
    last = tl.load(ends + (num_experts - 1) * each + spans % each, mask=known, other=0)  # of the piece
    limit = tl.zeros([SPANS], tl.int32) + num_rows
    if PIECES:
        begin = tl.load(starts + spans, mask=known, other=0)
        for further in tl.static_range(1, each):  # not into the next piece that has rows
            there = known & (spans % each + further < each)
            first_row = tl.load(starts + spans % each + further, mask=there, other=0)
            until_row = tl.load(ends + (num_experts - 1) * each + spans % each + further, mask=there, other=0)
            limit = tl.where(until_row > first_row, tl.minimum(limit, first_row), limit)
    else:
        begin = tl.load(ends + spans - 1, mask=known & (spans > 0), other=0)
    counts = tl.where(known, (end - begin + TILE - 1) // TILE, 0)
    whole = tl.minimum(begin + (end - begin + STEP - 1) // STEP * STEP, limit)
    end = tl.where(known & (end == last), whole, end)
    until = tl.cumsum(counts, 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (until[None, :] > at[:, None]) & (until[None, :] - counts[None, :] <= at[:, None])
    expert = tl.sum(tl.where(mine, spans[None, :] // each, 0), 1)
    first = tl.sum(tl.where(mine, begin[None, :] + (at[:, None] - until[None, :] + counts[None, :]) * TILE, 0), 1)
    final = tl.sum(tl.where(mine, end[None, :], 0), 1)
    real = at < most
    tl.store(tiles + at * 3, expert, mask=real)
    tl.store(tiles + at * 3 + 1, first, mask=real)
    tl.store(tiles + at * 3 + 2, final, mask=real)
    if tl.program_id(0) == 0:
        tl.store(tiles + most * 3, tl.sum(counts, 0))


@aggregate
class Buffers:
    """Shared memory of a program: stages of both operands with two barriers each, and each warpgroup's part of a finished tile."""

    a: _Memory
    b: _Memory
    out: _Memory
    full: _Memory
    empty: _Memory
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, out, full, empty):
        self.a = a
        self.b = b
        self.out = out
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(b.shape[0])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def place(t, num_rows, num_features, SPAN: gl.constexpr):
    """(tile of rows, tile of features) of tile `t`: SPAN tiles of rows go through all features together."""
    group = t // (SPAN * num_features)
    inside = t - group * SPAN * num_features
    height = gl.minimum(num_rows - group * SPAN, SPAN)
    return group * SPAN + inside % height, inside // height


@gluon.jit
def _load_rows(x_desc, w_desc, tiles, mem, most, num_features, steps, SPAN: gl.constexpr, TURNED: gl.constexpr):
    """The loading warp of `rows_product`."""
    BN: gl.constexpr = mem.out.shape[2]
    BK: gl.constexpr = mem.a.shape[2]
    BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    num_rows = gl.load(tiles + most * 3)
    done = 0
    for t in range(gl.program_id(0), num_rows * num_features, gl.num_programs(0)):
        m, n = place(t, num_rows, num_features, SPAN)
        expert = gl.load(tiles + m * 3)
        row = gl.load(tiles + m * 3 + 1)
        both = gl.load(tiles + m * 3 + 2) > row + 64
        for k in range(steps):
            slot = done % mem.STAGES
            bar = mem.full.index(slot)
            mbarrier.wait(mem.empty.index(slot), ((done // mem.STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES + x_desc.block_type.nbytes, pred=both)
            mbarrier.expect(bar, BYTES, pred=both == False)  # noqa: E712
            tma_load(x_desc, [row, k * BK], bar, mem.a.index(2 * slot))
            tma_load(x_desc, [row + 64, k * BK], bar, mem.a.index(2 * slot + 1), pred=both)
            weights = mem.b.index(slot)._reinterpret(w_desc.dtype, w_desc.block_type.shape, w_desc.layout)
            if TURNED:
                tma_load(w_desc, [expert, k * BK, n * BN], bar, weights)
            else:
                tma_load(w_desc, [expert, n * BN, k * BK], bar, weights)
            done += 1


@gluon.jit
def multiply(acc, mem, slot, PART: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, used):
    """Issues one stage's product."""
    a = mem.a.index(2 * slot + PART)
    b = mem.b.index(slot)
    if A_TURNED:
        a = a.permute((1, 0))
    if not B_TURNED:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=used, is_async=True)


@gluon.jit
def columns_of(scales, first, until, COUNT: gl.constexpr, layout: gl.constexpr):
    """COUNT scales of a tile's columns; each thread loads two and gets its own through shared memory, which saves registers of addresses."""
    columns = first + gl.arange(0, COUNT, gl.BlockedLayout([2], [32], [4], [0]))
    found = gl.load(scales + columns, mask=columns < until, other=0.0)
    return gl.convert_layout(found, gl.SliceLayout(0, layout))


@gluon.jit
def _sum_rows(
    out_desc,
    out,
    x_scales,
    w_scales,
    tiles,
    mem,
    most,
    num_features,
    steps,
    F,
    PART: gl.constexpr,
    SPAN: gl.constexpr,
    TURNED: gl.constexpr,
    SCALED: gl.constexpr,
):
    """A multiplying warpgroup of `rows_product`: 64 rows of every tile."""
    BN: gl.constexpr = mem.out.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // mem.a.dtype.primitive_bitwidth])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    num_rows = gl.load(tiles + most * 3)
    done = 0
    for t in range(gl.program_id(0), num_rows * num_features, gl.num_programs(0)):
        m, n = place(t, num_rows, num_features, SPAN)
        row = gl.load(tiles + m * 3 + 1) + 64 * PART
        left = gl.load(tiles + m * 3 + 2) - row
        acc = gl.zeros([64, BN], gl.float32, layout)
        for k in range(steps):
            slot = done % mem.STAGES
            mbarrier.wait(mem.full.index(slot), (done // mem.STAGES) & 1)
            if left > 0:  # else the other warpgroup has the tensor cores for itself
                acc = multiply(acc, mem, slot, PART, False, TURNED, k > 0)
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES), pred=k > 0)
            done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES))
        columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, layout))
        if SCALED:
            of_x = gl.load(x_scales + row + rows, mask=rows < left, other=0.0)
            acc = (
                acc * of_x[:, None] * columns_of(w_scales + gl.load(tiles + m * 3) * F, n * BN, F, BN, layout)[None, :]
            )
        made = acc.to(out.dtype.element_ty)
        if left >= 64:
            staged = mem.out.index(PART)
            tma.store_wait(0)
            warpgroup_barrier()
            staged.store(made)
            fence_async_shared()
            warpgroup_barrier()
            tma_store(out_desc, [row, n * BN], staged)
        else:
            places = out + (row + rows).to(gl.int64)[:, None] * F + columns[None, :]
            gl.store(places, made, mask=(rows < left)[:, None] & (columns < F)[None, :])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["most", "num_features", "steps"])
def rows_product(
    x_desc, w_desc, out_desc, out, x_scales, w_scales, tiles, most, num_features, steps, F,
    STAGES: gl.constexpr, SPAN: gl.constexpr, TURNED: gl.constexpr, SCALED: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """out [T, F] = x [T, R] times the weight of each row's expert: w [E, F, R], or where TURNED w [E, R, F].

    Where SCALED x and w are fp8 codes, with float32 scales of their rows, [T] and [E, F].
    """
    BK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = out_desc.block_type.shape[1]
    mem = Buffers(
        gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, BK], x_desc.layout),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BK, BN] if TURNED else [STAGES, BN, BK], x_desc.layout),
        gl.allocate_shared_memory(out_desc.dtype, [2, 64, BN], out_desc.layout),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum_rows,
                (out_desc, out, x_scales, w_scales, tiles, mem, most, num_features, steps, F, 0, SPAN, TURNED, SCALED),
            ),
            (
                _sum_rows,
                (out_desc, out, x_scales, w_scales, tiles, mem, most, num_features, steps, F, 1, SPAN, TURNED, SCALED),
            ),
            (_load_rows, (x_desc, w_desc, tiles, mem, most, num_features, steps, SPAN, TURNED)),
        ],
        [4, 1],
        [REGS, 24],
    )


def tile_of(features: int) -> tuple[int, int]:
    """(features of a tile, stages): half as wide where the last of a few wide tiles would be empty by half."""
    return (128, 5) if features <= 2048 and -features % 256 >= 128 else (256, 3)


def by_rows(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    turned: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    starts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, R] times each row's expert's weight: [T, F] in `dtype`, or that of x; weight is [E, F, R], or [E, R, F] where `turned`.

    With `scales`, float32 [T] and [E, F], both are fp8 codes, and the weight is not turned. With `starts` int32 [E, n] each expert has n
    spans of rows, which end at `ends` [E, n]. With `out` the result is written there, rows of these experts alone.
    """
    num_rows, summed = x.shape
    features = weight.shape[2 if turned else 1]
    out = x.new_empty(num_rows, features, dtype=dtype or x.dtype) if out is None else out
    if not out.numel() or not summed:
        return out.zero_()
    width, stages = tile_of(features)
    most = triton.cdiv(num_rows, ROWS) + ends.numel()
    tiles = torch.empty(most + 1, 3, dtype=torch.int32, device=x.device)
    list_tiles[(triton.cdiv(most, 64),)](
        ends if starts is None else starts, ends, tiles, num_rows, len(weight), most,
        SPANS=triton.next_power_of_2(ends.numel()), PIECES=0 if starts is None else starts.shape[1],
        BLOCK=64, TILE=ROWS, STEP=STEP, num_warps=4,
    )  # fmt: skip
    step = STEP * 2 // x.element_size()
    box = (1, step, width) if turned else (1, width, step)
    rows_product[(locate(x.device).num_sms,)](
        boxes(x, 64, step), boxes(weight, *box), boxes(out, 64, width), out, *(scales or (out, out)), tiles, most,
        triton.cdiv(features, width), triton.cdiv(summed, step), features,
        STAGES=stages, SPAN=SPAN, TURNED=turned, SCALED=scales is not None, REGS=REGISTERS, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
