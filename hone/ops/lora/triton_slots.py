"""Products with the LoRA factors of many adapters at once: each row of x has the factors of its own slot.

Nothing is sorted and the host needs to know no slot, so that a captured graph serves every mixture: a program takes a block of rows,
finds the slots that occur in it, and multiplies each with its rows. A prompt's rows are neighbours with one slot, and one program does
them all; while few rows decode, every slot has programs of its own (`triton_slots_few`). Ranks are each slot's own. Chen et al. 2023 (Punica,
arXiv:2310.18547) name the two products shrink and expand.

Shapes: T rows, K input features, N output features, P pieces of a linear (q, k, v), R largest rank of a piece, S parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel
from hone.ops.lora.triton_slots_few import few_parts, launch_expand_few, launch_shrink_few

FEW_ROWS = 64
"""Rows up to which every slot has programs of its own."""
_BLOCK_T, _BLOCK_R = 64, 16


@triton.jit(do_not_specialize=["T"])
def shrink(
    x, downs, slots, ranks, out, T, K, stride_x, stride_slot, stride_ranks,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, P, R] float32, at the rows and ranks that there are: x A^T by the A of the row's slot."""
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    blocks: tl.constexpr = RANK // BLOCK_R
    piece, begin = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_R
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.load(slots + rows, mask=rows < T, other=-1).to(tl.int32)
    r, ks = begin + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    x_rows = x + tl.program_id(1).to(tl.int64) * BLOCK_T * stride_x + tl.arange(0, BLOCK_T)[:, None] * stride_x
    places = out + rows[:, None] * (PIECES * RANK) + piece * RANK + r[None, :]
    slot = tl.max(ids, 0)
    while slot >= 0:
        mine = ids == slot
        rank = tl.load(ranks + slot * stride_ranks + piece)
        if begin < rank:
            a_rows = downs + slot.to(tl.int64) * stride_slot + (piece * RANK + r)[None, :] * K
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for k in range(0, K, BLOCK_K):
                inside = k + ks < K
                xs = tl.load(x_rows + (k + ks)[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_rows + (k + ks)[:, None], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
                total = tl.dot(xs, a, total, input_precision="ieee")
            tl.store(places, total, mask=mine[:, None] & (r < rank)[None, :])
        slot = tl.max(tl.where(ids < slot, ids, -1), 0)


@triton.jit(do_not_specialize=["T"])
def expand(
    narrow, ups, slots, ranks, factors, table, y, T, stride_slot, stride_ranks, stride_factors, stride_y,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, N] += u B^T, where the row has a slot, u of `narrow`. With SCALED y is multiplied and shifted before.

    `table` int32 [spans, 3]: of each span of BLOCK_N output features its piece, its first feature and the end of the piece.
    """
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    piece = tl.load(table + tl.program_id(0) * 3)
    n = tl.load(table + tl.program_id(0) * 3 + 1) + tl.arange(0, BLOCK_N)
    inside = n < tl.load(table + tl.program_id(0) * 3 + 2)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.load(slots + rows, mask=rows < T, other=-1).to(tl.int32)
    rs = tl.arange(0, BLOCK_R)
    u_rows = narrow + rows[:, None] * (PIECES * RANK) + piece * RANK
    y_rows = y + tl.program_id(1).to(tl.int64) * BLOCK_T * stride_y + tl.arange(0, BLOCK_T)[:, None] * stride_y
    slot = tl.max(ids, 0)
    while slot >= 0:
        mine = (ids == slot)[:, None]
        rank = tl.load(ranks + slot * stride_ranks + piece)
        begin = tl.where(rank == 0, -BLOCK_R, 0) if SCALED else 0  # without ranks y is scaled all the same
        while begin < rank:
            r = begin + rs
            real = (r >= 0) & (r < rank)
            low = tl.load(u_rows + r[None, :], mask=mine & real[None, :], other=0.0).to(ups.dtype.element_ty)
            b_rows = ups + slot.to(tl.int64) * stride_slot + r[:, None]
            b = tl.load(b_rows + n[None, :] * RANK, mask=inside[None, :] & real[:, None], other=0.0)
            added = tl.dot(low, b, input_precision="ieee")
            before = tl.load(y_rows + n[None, :], mask=mine & inside[None, :], other=0.0).to(tl.float32)
            if SCALED:  # noqa: SIM102 -- decided when the kernel is compiled
                if begin <= 0:
                    scale = factors + slot.to(tl.int64) * stride_factors + n * 2
                    before = before * tl.load(scale, mask=inside, other=1.0)[None, :]
                    before += tl.load(scale + 1, mask=inside, other=0.0)[None, :]
            tl.store(y_rows + n[None, :], (before + added).to(y.dtype.element_ty), mask=mine & inside[None, :])
            begin += BLOCK_R
        slot = tl.max(tl.where(ids < slot, ids, -1), 0)


def launch_shrink(x: Tensor, downs: Tensor, slots: Tensor, ranks: Tensor) -> Tensor:
    """The parts of x A^T, float32 [S, T, P, R], undefined where a row has no slot and beyond its rank."""
    (rows, columns), pieces = x.shape, ranks.shape[1]
    rank, few = downs.shape[1] // pieces, rows <= FEW_ROWS
    out = x.new_empty(few_parts(columns)[0] if few else 1, rows, pieces, rank, dtype=torch.float32)
    if not rows:
        return out
    if few:
        launch_shrink_few(x, downs, slots, ranks, out)
        return out
    block_k = 128 if columns >= 128 else max(16, triton.next_power_of_2(columns))
    shrink[(pieces * (rank // _BLOCK_R), triton.cdiv(rows, _BLOCK_T))](
        x, downs, slots, ranks, out, rows, columns, x.stride(0), downs.stride(0), ranks.stride(0),
        PIECES=pieces, RANK=rank, BLOCK_T=_BLOCK_T, BLOCK_R=_BLOCK_R, BLOCK_K=block_k, num_warps=4,
        **launch_options(early_launch(x.device)),
    )  # fmt: skip
    return out


def launch_expand(
    narrow: Tensor, ups: Tensor, slots: Tensor, ranks: Tensor, y: Tensor, widths: Sequence[int], factors: Tensor | None
) -> None:
    """y [T, N] += the sum of the parts of `narrow` times B^T, by the slot of each row."""
    (_, rows, pieces, rank), few = narrow.shape, len(y) <= FEW_ROWS
    if not rows:
        return
    span = 256 if few else 64
    table = _spans(tuple(widths), span, y.device)
    if few:
        launch_expand_few(narrow, ups, slots, ranks, y, table, span, factors)
        return
    expand[(len(table), triton.cdiv(rows, _BLOCK_T))](
        narrow, ups, slots, ranks, narrow if factors is None else factors, table, y, rows, ups.stride(0), ranks.stride(0),
        0 if factors is None else factors.stride(0), y.stride(0), PIECES=pieces, RANK=rank, BLOCK_T=_BLOCK_T,
        BLOCK_R=min(64, triton.next_power_of_2(rank)), BLOCK_N=span, SCALED=factors is not None, num_warps=8,
        **launch_options(early_launch(y.device)),
    )  # fmt: skip


@cache
def _spans(widths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """int32 [spans, 3]: the piece, first feature and end of each span of at most `size` output features. Kept: graphs read it."""
    rows = []
    for piece, end in enumerate(accumulate(widths)):
        rows += [(piece, begin, end) for begin in range(end - widths[piece], end, size)]
    return torch.tensor(rows, dtype=torch.int32).to(device)
