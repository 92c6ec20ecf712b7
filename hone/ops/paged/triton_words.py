"""Decode attention over pages of 8-bit numbers, which are read as 32-bit words and widened in registers.

A word holds columns 4c ... 4c + 3 of a slot. The j-th bytes of all words form a matrix [N, D/4], and both products are sums
(or columns) over four such matrices: no value moves to another thread, and none is transposed, which is impossible for
bytes in shared memory. float16 represents every float8 (e4m3) and int8 number exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops.paged.triton_blocks import INTERPRETED, load_block, load_scales, near_1, page_ids, soften, visible


@triton.jit
def _widened(words, J: tl.constexpr, INTEGER: tl.constexpr):
    """Number J (0 ... 3, lowest byte first) of each word, float16. Two words at a time."""
    PICK: tl.constexpr = ("0x0040", "0x0051", "0x0062", "0x0073")[J]
    if INTERPRETED:
        bytes_ = ((words >> (8 * J)) & 0xFF).to(tl.uint8)
        if INTEGER:
            wide = bytes_.to(tl.int8, bitcast=True).to(tl.float16)
        else:
            wide = bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif INTEGER:
        # The byte, x + 128, as the low byte of a float16 with high byte 0x64 (1024); then 1024 + 128 is subtracted.
        wide = tl.inline_asm_elementwise(
            "{ .reg .b32 pair, off; prmt.b32 pair, $1, $2, " + PICK + "; prmt.b32 pair, pair, 0x64646464, 0x4140; "
            "mov.b32 off, 0x64806480; sub.rn.f16x2 $0, pair, off; }",
            "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip
    else:
        wide = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; .reg .b16 low, high; prmt.b32 pair, $1, $2, " + PICK + "; mov.b32 {low, high}, pair; "
            "cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip
    return wide


@triton.jit
def _shifted(words, INTEGER: tl.constexpr):
    """int8 numbers plus 128, as `_widened` takes them; float8 ones as they are."""
    if INTEGER and not INTERPRETED:
        words = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return words


@triton.jit
def _queries(at, real, J: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns J, J + 4, J + 8 ... of the queries, float16."""
    d = 4 * tl.arange(0, BLOCK_D // 4) + J
    return tl.load(at[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float16)


@triton.jit
def attend_words(q_at, real, place, k_pages, v_pages, k_scales, v_scales, walk, scale, window, sink_tokens,
                 k_page, k_slot, v_page, v_slot, ks_page, ks_slot, vs_page, vs_slot,
                 DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
                 WINDOWED: tl.constexpr, MANY: tl.constexpr, INTEGER: tl.constexpr):  # fmt: skip
    """(acc [M, Dv] before the division, highest score, sum) of a tile's blocks; pages and their strides are in int32 words."""
    table, begin, end, kept, skipped, seq_len = walk
    q0 = _queries(q_at, real, 0, DIM, BLOCK_D)
    q1 = _queries(q_at, real, 1, DIM, BLOCK_D)
    q2 = _queries(q_at, real, 2, DIM, BLOCK_D)
    q3 = _queries(q_at, real, 3, DIM, BLOCK_D)
    if not MANY:
        place = seq_len - 1 + tl.zeros([1], tl.int32)  # of the sequence's one token
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed at the end: a sum over warps would make them all wait
    acc0 = tl.zeros([BLOCK_M, BLOCK_DV // 4], tl.float32)
    acc1 = tl.zeros([BLOCK_M, BLOCK_DV // 4], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_DV // 4], tl.float32)
    acc3 = tl.zeros([BLOCK_M, BLOCK_DV // 4], tl.float32)
    block = tl.where(begin < kept, begin, begin + skipped)
    page = page_ids(table, block, seq_len, BLOCK_N, PAGE_SIZE)
    to_1 = near_1(load_scales(v_scales, page, block, seq_len, vs_page, vs_slot, BLOCK_N, PAGE_SIZE))
    for unit in tl.range(begin, end, num_stages=STAGES):
        block = tl.where(unit < kept, unit, unit + skipped)
        k = load_block(k_pages, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, DIM // 4, BLOCK_D // 4, True)
        v = load_block(
            v_pages, page, block, seq_len, v_page, v_slot, BLOCK_N, PAGE_SIZE, DIM_V // 4, BLOCK_DV // 4, True
        )
        k_scale = load_scales(k_scales, page, block, seq_len, ks_page, ks_slot, BLOCK_N, PAGE_SIZE)
        v_scale = load_scales(v_scales, page, block, seq_len, vs_page, vs_slot, BLOCK_N, PAGE_SIZE)
        # The next block's page is loaded one iteration ahead to hide its latency.
        page = page_ids(table, tl.where(unit + 1 < kept, unit + 1, unit + 1 + skipped), seq_len, BLOCK_N, PAGE_SIZE)
        k = _shifted(k, INTEGER)
        v = _shifted(v, INTEGER)
        s = tl.dot(q0, tl.trans(_widened(k, 0, INTEGER)))
        s = tl.dot(q1, tl.trans(_widened(k, 1, INTEGER)), s)
        s = tl.dot(q2, tl.trans(_widened(k, 2, INTEGER)), s)
        s = tl.dot(q3, tl.trans(_widened(k, 3, INTEGER)), s)
        s = s * (k_scale * scale)[None, :]
        keep = visible(block, seq_len, place, window, sink_tokens, BLOCK_N, WINDOWED, False)
        if MANY:
            s = tl.where(keep, s, float("-inf"))
        else:
            s += tl.where(keep, 0.0, float("-inf"))  # one row for all queries
        p, fade, top = soften(s, top, 1.0, False, True)
        total = total * fade[:, None] + p
        p = (p * tl.minimum(v_scale * to_1, 60000.0)[None, :]).to(tl.float16)
        acc0 = tl.dot(p, _widened(v, 0, INTEGER), acc0 * fade[:, None])
        acc1 = tl.dot(p, _widened(v, 1, INTEGER), acc1 * fade[:, None])
        acc2 = tl.dot(p, _widened(v, 2, INTEGER), acc2 * fade[:, None])
        acc3 = tl.dot(p, _widened(v, 3, INTEGER), acc3 * fade[:, None])
    # The last axis of a join is the fastest: column 4c + 2i + j is entry (c, i, j).
    acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)).reshape(BLOCK_M, BLOCK_DV)
    return acc / to_1, top, tl.sum(total, 1)
