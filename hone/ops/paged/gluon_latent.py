"""Decode attention over latents for many heads on Hopper: one warp loads by TMA, two warpgroups compute (Gluon).

A tile is 64 heads of one sequence. Both warpgroups compute all scores (from the same latents in shared memory) and each
multiplies them with half of the value columns, because 64 x 512 sums do not fit in one warpgroup's registers. That is half
as many products again as needed, but nothing is exchanged, and one warpgroup's softmax overlaps the other's products. The
blocks of all tiles form one list, divided equally among the programs as in `hone.ops.paged.triton_decode`, whose `combine`
merges tiles that were split.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hone.ops.compat import aggregate, tma_load, warpgroup_barrier
from hone.ops.descriptors import boxes
from hone.ops.paged.triton_decode import combine

HEADS = gl.constexpr(64)
BLOCK = gl.constexpr(64)
HALF = gl.constexpr(256)
ROPE_DIM = gl.constexpr(64)
STAGES = gl.constexpr(2)
_LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_seqs"])
def block_ends(seq_lens, ends, num_seqs, TILES: tl.constexpr, SEQS: tl.constexpr, BLOCK_N: tl.constexpr):
    """ends [R]: the end of each sequence's blocks in the list of all tiles' blocks."""
    seqs = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    blocks = tl.where(seqs < num_seqs, tl.maximum(tl.cdiv(lens, BLOCK_N), 1) * TILES, 0)
    tl.store(ends + seqs, tl.cumsum(blocks, 0), mask=seqs < num_seqs)


_Memory = gl.shared_memory_descriptor


@aggregate
class Latents:
    """Shared memory and its barriers: the two halves of a latent and its rotated columns, separately."""

    q0: _Memory
    q1: _Memory
    qt: _Memory
    k0: _Memory
    k1: _Memory
    kt: _Memory
    q_ready: _Memory
    q_free: _Memory
    k_ready: _Memory
    k_free: _Memory

    @gluon.constexpr_function
    def __init__(self, q0, q1, qt, k0, k1, kt, q_ready, q_free, k_ready, k_free):
        self.q0 = q0
        self.q1 = q1
        self.qt = qt
        self.k0 = k0
        self.k1 = k1
        self.kt = kt
        self.q_ready = q_ready
        self.q_free = q_free
        self.k_ready = k_ready
        self.k_free = k_free


@gluon.jit
def _share(ends, num_seqs):
    """(blocks per program, this program's begin and end in the list, the sequence of its first block)."""
    total = gl.load(ends + num_seqs - 1)
    per = gl.cdiv(total, gl.num_programs(0))
    begin = gl.program_id(0) * per
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if gl.load(ends + middle) <= begin:
            low = middle + 1
        else:
            high = middle
    return per, begin, gl.minimum(begin + per, total), low


@gluon.jit
def _tile(seq_lens, ends, seq, begin, end, TILES: gl.constexpr):
    """(sequence, its length, head tile, the tile's first block in the list, its blocks, the end of this program's part)."""
    if gl.load(ends + seq) <= begin:
        seq += 1
    seq_len = gl.load(seq_lens + seq).to(gl.int32)
    blocks = gl.maximum(gl.cdiv(seq_len, BLOCK), 1)
    first = gl.load(ends + seq) - blocks * TILES
    head = (begin - first) // blocks
    tile = first + head * blocks
    return seq, seq_len, head, tile, blocks, gl.minimum(end - tile, blocks)


@gluon.jit
def _produce(q_half, q_rope, k_half, k_rope, table, table_row, seq_lens, ends, num_seqs, mem, TILES: gl.constexpr,
             PAGE_SIZE: gl.constexpr):  # fmt: skip
    """The loading warp."""
    _per, begin, end, seq = _share(ends, num_seqs)
    turn = 0
    slot = 0
    while begin < end:
        seq, seq_len, head, tile, _blocks, stop = _tile(seq_lens, ends, seq, begin, end, TILES)
        mbarrier.wait(mem.q_free, (turn & 1) ^ 1)
        mbarrier.expect(mem.q_ready, 2 * (2 * HEADS * HALF + HEADS * ROPE_DIM))
        tma_load(q_half, [seq, head * HEADS, 0], mem.q_ready, mem.q0)
        tma_load(q_half, [seq, head * HEADS, HALF], mem.q_ready, mem.q1)
        tma_load(q_rope, [seq, head * HEADS, 2 * HALF], mem.q_ready, mem.qt)
        for block in range(begin - tile, stop):
            b = slot % STAGES
            page = gl.load(
                table
                + seq.to(gl.int64) * table_row
                + gl.minimum(block * BLOCK, gl.maximum(seq_len - 1, 0)) // PAGE_SIZE
            )
            offset = block * BLOCK % PAGE_SIZE
            mbarrier.wait(mem.k_free.index(b), ((slot // STAGES) & 1) ^ 1)
            ready = mem.k_ready.index(b)
            mbarrier.expect(ready, 2 * (2 * BLOCK * HALF + BLOCK * ROPE_DIM))
            tma_load(k_half, [page, offset, 0], ready, mem.k0.index(b))
            tma_load(k_half, [page, offset, HALF], ready, mem.k1.index(b))
            tma_load(k_rope, [page, offset, 2 * HALF], ready, mem.kt.index(b))
            slot += 1
        turn += 1
        begin = tile + stop


@gluon.jit
def _scores(mem, b, layout: gl.constexpr):
    """q k^T [64, 64] of the keys in slot b."""
    k0 = mem.k0.index(b).reshape([BLOCK, HALF]).permute((1, 0))
    k1 = mem.k1.index(b).reshape([BLOCK, HALF]).permute((1, 0))
    kt = mem.kt.index(b).reshape([BLOCK, ROPE_DIM]).permute((1, 0))
    zeros = gl.zeros([HEADS, BLOCK], gl.float32, layout)
    s = warpgroup_mma(mem.q0.reshape([HEADS, HALF]), k0, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma(mem.q1.reshape([HEADS, HALF]), k1, s, is_async=True)
    return warpgroup_mma(mem.qt.reshape([HEADS, ROPE_DIM]), kt, s, is_async=True)


@gluon.jit
def _zeroed_past(values, count):
    """Sets rows from `count` on to 0: a weight of 0 times NaN or infinity in an unused slot would not be 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    x = values.load(layout)
    values.store(gl.where((rows < count)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    warpgroup_barrier()


@gluon.jit
def _consume(out, part, part_lse, note, seq_lens, ends, num_seqs, heads, out_row, out_head, scale_log2, mem,
             TILES: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """One warpgroup: all scores of this program's tiles, and half PART of their value columns."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    pid = gl.program_id(0)
    per, begin, end, seq = _share(ends, num_seqs)
    turn = 0
    slot = 0
    if PART == 0:
        gl.store(note + pid * 3, 0)
    columns = gl.arange(0, HALF, gl.SliceLayout(0, o_layout)) + PART * HALF
    m = gl.arange(0, HEADS, o_rows)
    n = gl.arange(0, BLOCK, gl.SliceLayout(0, s_layout))
    while begin < end:
        seq, seq_len, head, tile, blocks, stop = _tile(seq_lens, ends, seq, begin, end, TILES)
        top = gl.full([HEADS], float("-inf"), gl.float32, s_rows)
        total = gl.zeros([HEADS], gl.float32, s_rows)
        acc = gl.zeros([HEADS, HALF], gl.float32, o_layout)
        mbarrier.wait(mem.q_ready, turn & 1)
        for block in range(begin - tile, stop):
            b = slot % STAGES
            mbarrier.wait(mem.k_ready.index(b), (slot // STAGES) & 1)
            values = mem.k0.index(b) if PART == 0 else mem.k1.index(b)
            values = values.reshape([BLOCK, HALF])
            if (block + 1) * BLOCK > seq_len:
                _zeroed_past(values, seq_len - block * BLOCK)
            s = warpgroup_mma_wait(0, deps=[_scores(mem, b, s_layout)])
            if (block + 1) * BLOCK > seq_len:
                s = gl.where((block * BLOCK + n < seq_len)[None, :], s, float("-inf"))
            higher = gl.maximum(top, gl.max(s, 1))
            base = gl.where(higher == float("-inf"), 0.0, higher) * scale_log2
            p = gl.exp2(s * scale_log2 - base[:, None])
            fade = gl.exp2(top * scale_log2 - base)
            top = higher
            total = total * fade + gl.sum(p, 1)
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]
            acc = warpgroup_mma(gl.convert_layout(p.to(out.dtype.element_ty), p_layout), values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(mem.k_free.index(b))
            slot += 1
        mbarrier.arrive(mem.q_free)
        inverse = 1.0 / gl.where(total > 0, total, 1.0)
        acc = acc * gl.convert_layout(inverse, o_rows)[:, None]
        if (begin == tile) & (stop == blocks):
            at = out + seq.to(gl.int64) * out_row + (head * HEADS + m) * out_head
            gl.store(
                at[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=(head * HEADS + m < heads)[:, None]
            )
        else:
            starts = begin == tile
            entry = 2 * pid + starts.to(gl.int32)
            gl.store(part + ((entry * HEADS + m) * (2 * HALF))[:, None] + columns[None, :], acc)
            if PART == 0:
                lse = gl.where(total > 0, top * scale_log2 + gl.log2(gl.where(total > 0, total, 1.0)), float("-inf"))
                gl.store(part_lse + entry * HEADS + gl.arange(0, HEADS, s_rows), lse)
                if starts:
                    gl.store(note + pid * 3, (tile + blocks - 1) // per - pid + 1)
                    gl.store(note + pid * 3 + 1, seq)
                    gl.store(note + pid * 3 + 2, head)
        turn += 1
        begin = tile + stop


@gluon.jit(do_not_specialize=["table_row", "num_seqs", "heads"])
def decode_latents(q_half, q_rope, k_half, k_rope, table, seq_lens, ends, out, part, part_lse, note,
                   table_row, num_seqs, heads, out_row, out_head, scale_log2,
                   TILES: gl.constexpr, PAGE_SIZE: gl.constexpr):  # fmt: skip
    """One program per multiprocessor; see the module. `part`, `part_lse`, `note` as in `hone.ops.paged.triton_decode.decode`."""
    mem = Latents(
        gl.allocate_shared_memory(q_half.dtype, [1, HEADS, HALF], q_half.layout),
        gl.allocate_shared_memory(q_half.dtype, [1, HEADS, HALF], q_half.layout),
        gl.allocate_shared_memory(q_half.dtype, [1, HEADS, ROPE_DIM], q_rope.layout),
        gl.allocate_shared_memory(q_half.dtype, [STAGES, 1, BLOCK, HALF], k_half.layout),
        gl.allocate_shared_memory(q_half.dtype, [STAGES, 1, BLOCK, HALF], k_half.layout),
        gl.allocate_shared_memory(q_half.dtype, [STAGES, 1, BLOCK, ROPE_DIM], k_rope.layout),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(mem.q_ready, count=1)
    mbarrier.init(mem.q_free, count=2)
    for b in gl.static_range(STAGES):
        mbarrier.init(mem.k_ready.index(b), count=1)
        mbarrier.init(mem.k_free.index(b), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, part, part_lse, note, seq_lens, ends, num_seqs, heads, out_row, out_head, scale_log2, mem,
                        TILES, 0)),
            (_consume, (out, part, part_lse, note, seq_lens, ends, num_seqs, heads, out_row, out_head, scale_log2, mem,
                        TILES, 1)),
            (_produce, (q_half, q_rope, k_half, k_rope, table, table_row, seq_lens, ends, num_seqs, mem, TILES,
                        PAGE_SIZE)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch(out: Tensor, q: Tensor, pages: Tensor, table: Tensor, seq_lens: Tensor, scale: float, programs: int) -> None:
    """out [R, H, 512] of q [R, H, 576] over pages [num_pages, page_size, 576]; page_size a multiple of 64, one token per sequence."""
    num_seqs, heads, _ = q.shape
    tiles = -(-heads // 64)
    ends = torch.empty(num_seqs, dtype=torch.int32, device=q.device)
    part = torch.empty(2 * programs * 64 * 512, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(2 * programs * 64, dtype=torch.float32, device=q.device)
    note = torch.empty(programs, 3, dtype=torch.int32, device=q.device)
    block_ends[(1,)](
        seq_lens, ends, num_seqs, TILES=tiles, SEQS=max(16, triton.next_power_of_2(num_seqs)), BLOCK_N=64, num_warps=4
    )
    decode_latents[(programs,)](
        boxes(q, 1, 64, 256), boxes(q, 1, 64, 64), boxes(pages, 1, 64, 256), boxes(pages, 1, 64, 64),
        table, seq_lens, ends, out, part, part_lse, note, table.stride(0), num_seqs, heads, *out.stride()[:2], scale * _LOG2E,
        TILES=tiles, PAGE_SIZE=pages.shape[1], num_warps=4, maxnreg=168,
    )  # fmt: skip
    combine[(programs, min(heads, 64))](
        part, part_lse, note, seq_lens, part_lse, out, *out.stride()[:2],
        GROUP=min(heads, 64), DIM_V=512, BLOCK_DV=512, BLOCK_M=64, SEQS=16, SPLITS=32, MANY=False, SINKS=False,
        EARLY=False, num_warps=4,
    )  # fmt: skip
