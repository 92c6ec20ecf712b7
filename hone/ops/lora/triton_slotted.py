"""A linear with the LoRA factors of many adapters while few rows decode: the adapters cost one small kernel beside the base's own.

The factors of every adapter of a step make more columns of the weight, [W | B_0 | B_1 ...], and x A^T more columns of x, zero where a
row has another adapter: y = W x + B u is then one product, rounded once, in which each B is read once. x A^T is made by a kernel in
front (`narrow_rows`); the product does not wait for it before the columns of W are done, because x is older than that kernel
(`hone.ops.early`). A row's result is that of the base alone plus its own adapter's, whatever other adapters the step has.

Shapes: T rows, K input features, N output features, P pieces of a linear (q, k, v), R ranks of a piece, G adapters of a step,
S parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, prefetch, previous_kernel_done, start_next_kernel
from hone.ops.linear.shapes import SkinnyShape, power_of_2, slotted_shape
from hone.ops.linear.triton_skinny import parts_of, sum_of_columns, sum_parts

_BLOCK_R, _BLOCK_K, _BLOCK_C = 16, 256, 64
_PROGRAMS = 264
"""Of the kernel in front: two an SM of an H200."""


@triton.jit(do_not_specialize=["T"])
def group_rows(slots, groups, T, size, BLOCK: tl.constexpr):
    """groups int32 [1 + 2 BLOCK + n]: the number of slots that occur, these in ascending order, each row's place among them or -1, zeros."""
    rows = tl.arange(0, BLOCK)
    for begin in range(1 + 2 * BLOCK, size, 1024):
        zeros = begin + tl.arange(0, 1024)
        tl.store(groups + zeros, 0, mask=zeros < size)
    ids = tl.load(slots + rows, mask=rows < T, other=-1).to(tl.int32)
    before = tl.load(slots + rows[:, None] + rows[None, :] * 0, mask=rows[:, None] < T, other=-1).to(tl.int32)
    # A row is its slot's first where no row before it has the slot; a slot's place counts the smaller first rows.
    same = (before == ids[None, :]) & (rows[:, None] < rows[None, :])
    first = (tl.max(same.to(tl.int32), 0) == 0) & (ids >= 0)
    tl.store(groups + 1 + BLOCK + rows, tl.where(first, ids, -1))
    tl.debug_barrier()
    firsts = tl.load(groups + 1 + BLOCK + rows[:, None] + rows[None, :] * 0)
    tl.debug_barrier()
    place = tl.sum(((firsts >= 0) & (firsts < ids[None, :])).to(tl.int32), 0)
    tl.store(groups + 1 + place, ids, mask=first)
    tl.store(groups + 1 + BLOCK + rows, tl.where(ids >= 0, place, -1))
    tl.store(groups, tl.sum(first.to(tl.int32), 0))


@triton.jit(do_not_specialize=["T"])
def narrow_rows(
    x, downs, groups, ranks, sums, out, T, K, stride_x, stride_slot, stride_ranks, stride_part, stride_piece, stride_out,
    RANK: tl.constexpr, ROOM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [P, T, G R]: x A^T by each adapter of the step, zero where the row has another one and beyond the adapter's rank.

    Of the programs of one block of `out`, one for each part of K, the last to end adds what all have left in `sums`, in their order.
    All programs fit beside those of the product, which start when the last of these has.
    """
    blocks: tl.constexpr = RANK // BLOCK_R
    lanes, count = tl.num_programs(1), tl.load(groups)
    part, block = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    piece, begin = block // blocks, block % blocks * BLOCK_R
    rows, r = tl.arange(0, BLOCK_T), begin + tl.arange(0, BLOCK_R)
    a_rows = downs + (piece * RANK + r)[None, :] * K
    owners = tl.load(groups + 1 + ROOM + rows, mask=rows < T, other=-1)
    if EARLY:
        lines = tl.minimum(part * WIDTH + tl.arange(0, WIDTH // 64) * 64, K - 1)[:, None]
        for group in range(tl.program_id(1), count, lanes):
            prefetch(a_rows + tl.load(groups + 1 + group).to(tl.int64) * stride_slot + lines)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    for group in range(tl.program_id(1), count, lanes):
        slot = tl.load(groups + 1 + group)
        rank = tl.load(ranks + slot * stride_ranks + piece)
        mine = (owners == group)[:, None]
        total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK_K):
            k = part * WIDTH + start + tl.arange(0, BLOCK_K)
            a = tl.load(
                a_rows + slot.to(tl.int64) * stride_slot + k[:, None],
                mask=(k < K)[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            xs = tl.load(x + rows[:, None] * stride_x + k[None, :], mask=mine & (k < K)[None, :], other=0.0)
            total = tl.dot(xs, a, total, input_precision="ieee")
        places = out + piece * stride_piece + rows[:, None] * stride_out + group * RANK + r[None, :]
        if PARTS > 1:
            tile = (block * ROOM + group) * (BLOCK_T * BLOCK_R)
            cells = sums + tile + rows[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
            tl.store(cells + part.to(tl.int64) * stride_part, total)
            tl.debug_barrier()
            ended = groups + 1 + 2 * ROOM + block * ROOM + group
            if tl.atomic_add(ended, 1, sem="acq_rel") == PARTS - 1:
                tl.debug_barrier()
                total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for one in tl.static_range(PARTS):
                    total += tl.load(cells + one * stride_part, cache_modifier=".cg")
                tl.store(places, total.to(out.dtype.element_ty), mask=(rows < T)[:, None])
                tl.store(ended, 0)
        else:
            tl.store(places, total.to(out.dtype.element_ty), mask=(rows < T)[:, None])


@triton.jit
def _factors(ups, groups, n, begin, count, stride_slot, RANK: tl.constexpr, BLOCK_C: tl.constexpr):
    """B [BLOCK_N, BLOCK_C] of the columns from `begin` on of all adapters' ranks, one adapter after another."""
    c = begin + tl.arange(0, BLOCK_C)
    inside = c < count * RANK
    slot = tl.load(groups + 1 + c // RANK, mask=inside, other=0).to(tl.int64)
    rank = tl.max_contiguous(tl.multiple_of(c % RANK, 16), 16)
    return tl.load(
        ups + (slot * stride_slot)[None, :] + n[:, None] * RANK + rank[None, :], mask=inside[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["M"])
def slotted(
    x, weight, bias, ups, groups, narrow, out, M, N, K, stride_x, stride_weight, stride_out, stride_part,
    stride_slot, stride_piece, stride_narrow, END_0, END_1,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, RANK: tl.constexpr,
    ROOM: tl.constexpr, PARTS: tl.constexpr, WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    SOON: tl.constexpr, STAGES: tl.constexpr, MORE_STAGES: tl.constexpr,
):  # fmt: skip
    """`triton_skinny.skinny` with B u added; pieces are from 0, END_0 and END_1 on, multiples of BLOCK_N. Waits for `narrow` alone."""
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    first = part * blocks * BLOCK_K
    last = tl.minimum(first + blocks * BLOCK_K, K)
    inner = tl.minimum(rows, N - 1)
    weight_rows = weight + inner.to(tl.int64)[:, None] * stride_weight
    mine = columns[None, :] < M
    if SOON:
        start_next_kernel(EARLY)  # which reads nothing that `narrow_rows` wrote
    count = tl.load(groups)
    begin = part * BLOCK_C
    b = _factors(ups, groups, inner, begin, count, stride_slot, RANK, BLOCK_C)
    if EARLY:
        more: tl.constexpr = ROOM
        lines: tl.constexpr = (
            BLOCK_N // 4
        )  # of 64 numbers, in 16 ranks of a tile: a power of two, which all ranks together may not be
        if count * RANK > BLOCK_C * PARTS:
            g = tl.minimum(tl.arange(0, more), count - 1)
            slot = tl.load(groups + 1 + g).to(tl.int64)
            start = tl.program_id(0) * BLOCK_N * RANK + tl.arange(0, lines) * 64
            for _ in tl.static_range(0, RANK, 16):
                prefetch(ups + (slot * stride_slot)[:, None] + tl.minimum(start, (N - 1) * RANK)[None, :])
                start += BLOCK_N * 16
    total = sum_of_columns(
        x + columns[None, :] * stride_x, weight_rows, mine, first, last, BLOCK_N, BLOCK_M, BLOCK_K, WHOLE_K, STAGES
    )
    previous_kernel_done(EARLY)
    if not SOON:
        start_next_kernel(EARLY)
    at = tl.program_id(0) * BLOCK_N
    piece = (at >= END_0).to(tl.int32) + (at >= END_1).to(tl.int32)
    u_columns = narrow + piece * stride_piece + columns[None, :] * stride_narrow
    c = begin + tl.arange(0, BLOCK_C)[:, None]
    u = tl.load(u_columns + c, mask=mine & (c < count * RANK), other=0.0)
    added = tl.dot(b, u)
    begin += PARTS * BLOCK_C
    for start in tl.range(begin, count * RANK, PARTS * BLOCK_C, num_stages=MORE_STAGES):
        b = _factors(ups, groups, inner, start, count, stride_slot, RANK, BLOCK_C)
        c = start + tl.arange(0, BLOCK_C)[:, None]
        u = tl.load(u_columns + c, mask=mine & (c < count * RANK), other=0.0)
        added = tl.dot(b, u, added)
    places = out + part.to(tl.int64) * stride_part + columns[:, None] * stride_out + rows[None, :]
    result = tl.trans(total + added)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(columns[:, None] < M) & (rows[None, :] < N))


def launch_groups(slots: Tensor, blocks: int) -> Tensor:
    """What `slotted_product` reads of the slots of at most 64 rows; no linear has more than `blocks` blocks of 16 ranks."""
    room = max(16, power_of_2(len(slots)))
    groups = slots.new_empty(1 + (2 + blocks) * room, dtype=torch.int32)
    group_rows[(1,)](slots, groups, len(slots), len(groups), BLOCK=room, num_warps=4)
    return groups


def _narrow(x: Tensor, downs: Tensor, groups: Tensor, ranks: Tensor, room: int, width: int, early: bool) -> Tensor:
    """x A^T: [P, T, G R] in x's dtype, of as many adapters as there may be."""
    (rows, columns), pieces = x.shape, ranks.shape[1]
    rank, most, block_t = downs.shape[1] // pieces, min(rows, len(downs)), max(16, power_of_2(rows))
    parts, blocks = triton.cdiv(columns, width), pieces * (rank // _BLOCK_R)
    out = x.new_empty(pieces, rows, most * rank)
    sums = x.new_empty(parts, blocks * room * block_t * _BLOCK_R if parts > 1 else 0, dtype=torch.float32)
    narrow_rows[(blocks * parts, min(most, max(1, _PROGRAMS // (blocks * parts))))](
        x, downs, groups, ranks, sums, out, rows, columns, x.stride(0), downs.stride(0), ranks.stride(0), sums.stride(0),
        out.stride(0), out.stride(1), RANK=rank, ROOM=room, BLOCK_T=block_t, BLOCK_R=_BLOCK_R, BLOCK_K=min(_BLOCK_K, width),
        WIDTH=width, PARTS=parts, num_warps=4, **launch_options(early),
    )  # fmt: skip
    return out


def slotted_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, downs: Tensor, ups: Tensor, groups: Tensor, ranks: Tensor,
    widths: Sequence[int], *, shape: SkinnyShape | None = None, fresh: bool = False,
) -> Tensor:  # fmt: skip
    """x W^T + b + s (x A^T) B^T: [T, N], of at most 64 rows whose starts are 16-byte aligned.

    `fresh`: the kernel before this one wrote `groups`, which is then not read early.
    """
    (rows, columns), features = x.shape, len(weight)
    shape = shape or slotted_shape(rows, features, columns)
    width = 1024 if columns > 8192 else 512 if columns >= 1024 else max(64, power_of_2(columns) // 2)
    room, early = max(16, power_of_2(rows)), early_launch(x.device)
    narrow = _narrow(x, downs, groups, ranks, room, width, early and not fresh)
    out = x.new_empty(rows, features)
    parts = parts_of(rows, features, shape.parts, out)
    split = shape.parts > 1
    ends = [sum(widths[: index + 1]) for index in range(len(widths) - 1)] + [features] * 2
    slotted[(triton.cdiv(features, shape.block_n), shape.parts)](
        x, weight, bias, ups, groups, narrow, parts, rows, features, columns, x.stride(0), weight.stride(0), features,
        rows * features, ups.stride(0), narrow.stride(0), narrow.stride(1), ends[0], ends[1],
        BLOCK_N=shape.block_n, BLOCK_M=shape.block_m, BLOCK_K=shape.block_k, BLOCK_C=_BLOCK_C, RANK=ups.shape[2],
        ROOM=room, PARTS=shape.parts, WHOLE_K=columns % shape.block_k == 0,
        HAS_BIAS=bias is not None and not split, SOON=split, STAGES=shape.stages, MORE_STAGES=4,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(early),
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
