"""The kernels of `hone.ops.lora.triton_slots` while few rows decode: every slot has programs of its own, each of one tile.

What is older than the previous kernel (slots, ranks, factors) is read before that one is done (`hone.ops.early`), so that of the
chain of reads only those of x and y are left to wait for.

Shapes: T rows, K input features, N output features, P pieces of a linear (q, k, v), R largest rank of a piece, S parts of K.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel

_BLOCK_R = 16


@triton.jit(do_not_specialize=["T"])
def shrink_few(
    x, downs, slots, ranks, out, T, K, stride_x, stride_slot, stride_ranks, stride_part,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [S, T, P, R] float32, at the rows and ranks that there are: x A^T over each part of BLOCK_K columns, by the A of the row's slot."""
    blocks: tl.constexpr = RANK // BLOCK_R
    piece, begin = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_R
    part, slot = tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.load(slots + rows, mask=rows < T, other=-1).to(tl.int32) == slot
    rank = tl.load(ranks + slot * stride_ranks + piece)
    rank = tl.where(tl.max(mine.to(tl.int32), 0) > 0, rank, 0)
    r, k = begin + tl.arange(0, BLOCK_R), part * BLOCK_K + tl.arange(0, BLOCK_K)
    a_rows = downs + slot.to(tl.int64) * stride_slot + (piece * RANK + r)[None, :] * K
    a = tl.load(a_rows + k[:, None], mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    if begin < rank:
        x_rows = x + rows.to(tl.int64)[:, None] * stride_x
        xs = tl.load(x_rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(xs, a, input_precision="ieee")
        places = out + part.to(tl.int64) * stride_part + rows[:, None] * (PIECES * RANK) + piece * RANK + r[None, :]
        tl.store(places, total, mask=mine[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["T"])
def expand_few(
    narrow, ups, slots, ranks, factors, table, y, T, stride_slot, stride_ranks, stride_factors, stride_y, stride_part,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, N] += u B^T, where the row has a slot: u is the sum of the parts of `narrow`. With SCALED y is multiplied and shifted before.

    `table` int32 [spans, 3]: of each span of BLOCK_N output features its piece, its first feature and the end of the piece.
    """
    slot = tl.program_id(2)
    piece = tl.load(table + tl.program_id(0) * 3)
    n = tl.load(table + tl.program_id(0) * 3 + 1) + tl.arange(0, BLOCK_N)
    inside = n < tl.load(table + tl.program_id(0) * 3 + 2)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.load(slots + rows, mask=rows < T, other=-1).to(tl.int32) == slot
    present = tl.max(mine.to(tl.int32), 0) > 0
    rank = tl.where(present, tl.load(ranks + slot * stride_ranks + piece), 0)
    rs = tl.arange(0, BLOCK_R)
    b_rows = ups + slot.to(tl.int64) * stride_slot + n[None, :] * RANK
    b = tl.load(b_rows + rs[:, None], mask=inside[None, :] & (rs < rank)[:, None], other=0.0)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    if (rank > 0) | (present & SCALED):
        here = mine[:, None] & inside[None, :]
        places = y + rows.to(tl.int64)[:, None] * stride_y + n[None, :]
        total = tl.load(places, mask=here, other=0.0).to(tl.float32)
        if SCALED:
            scale = factors + slot.to(tl.int64) * stride_factors + n * 2
            total = total * tl.load(scale, mask=inside, other=1.0)[None, :]
            total += tl.load(scale + 1, mask=inside, other=0.0)[None, :]
        u_rows = narrow + rows[:, None] * (PIECES * RANK) + piece * RANK
        for begin in tl.static_range(0, RANK, BLOCK_R):
            r = begin + rs
            if begin > 0:
                b = tl.load(b_rows + r[:, None], mask=inside[None, :] & (r < rank)[:, None], other=0.0)
            u = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for part in tl.static_range(PARTS):
                u += tl.load(
                    u_rows + part * stride_part + r[None, :], mask=mine[:, None] & (r < rank)[None, :], other=0.0
                )
            total = tl.dot(u.to(ups.dtype.element_ty), b, total, input_precision="ieee")
        tl.store(places, total.to(y.dtype.element_ty), mask=here)


def few_parts(columns: int) -> tuple[int, int]:
    """(parts of K, columns of each)."""
    width = 1024 if columns > 16384 else 512 if columns >= 1024 else max(16, triton.next_power_of_2(columns) // 2)
    return triton.cdiv(columns, width), width


def launch_shrink_few(x: Tensor, downs: Tensor, slots: Tensor, ranks: Tensor, out: Tensor) -> None:
    """As `triton_slots.launch_shrink` into `out` [S, T, P, R], of at most 64 rows."""
    (rows, columns), pieces, (parts, width) = x.shape, ranks.shape[1], few_parts(x.shape[1])
    rank, block_t = downs.shape[1] // pieces, 16 if rows <= 16 else 32
    shrink_few[(pieces * (rank // _BLOCK_R), triton.cdiv(rows, block_t), parts * len(downs))](
        x, downs, slots, ranks, out, rows, columns, x.stride(0), downs.stride(0), ranks.stride(0), out.stride(0),
        PIECES=pieces, RANK=rank, BLOCK_T=block_t, BLOCK_R=_BLOCK_R, BLOCK_K=width, PARTS=parts, num_warps=4,
        **launch_options(early_launch(x.device)),
    )  # fmt: skip


def launch_expand_few(
    narrow: Tensor,
    ups: Tensor,
    slots: Tensor,
    ranks: Tensor,
    y: Tensor,
    table: Tensor,
    span: int,
    factors: Tensor | None,
) -> None:
    """As `triton_slots.launch_expand`, of at most 64 rows; `table` has spans of `span` output features."""
    parts, rows, pieces, rank = narrow.shape
    block_t = 16 if rows <= 16 else 32
    expand_few[(len(table), triton.cdiv(rows, block_t), len(ups))](
        narrow, ups, slots, ranks, narrow if factors is None else factors, table, y, rows, ups.stride(0), ranks.stride(0),
        0 if factors is None else factors.stride(0), y.stride(0), narrow.stride(0), PIECES=pieces, RANK=rank,
        BLOCK_T=block_t, BLOCK_R=_BLOCK_R, BLOCK_N=span, PARTS=parts, SCALED=factors is not None, num_warps=4,
        **launch_options(early_launch(y.device)),
    )  # fmt: skip
