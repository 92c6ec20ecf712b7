"""Parts shared by the paged attention kernels: blocks of keys found through the page table, and the running softmax.

Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867. Legend: M queries of a tile, N slots of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops import compat

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(compat.INTERPRETED)


@triton.jit
def row_blocks(seq_len, count, window, sink_tokens, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """(sink blocks, blocks skipped after them, blocks read) for the last `count` tokens of sequences as queries."""
    blocks = tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1)
    kept = seq_len * 0
    skipped = seq_len * 0
    if WINDOWED:
        first = tl.maximum(seq_len - count - window + 1, 0) // BLOCK_N
        kept = tl.minimum(tl.cdiv(sink_tokens, BLOCK_N), first)
        skipped = first - kept
    return kept, skipped, blocks - skipped


@triton.jit
def page_ids(table, block, seq_len, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The page of every slot of a block: one number when the block lies within a page, else [BLOCK_N]."""
    n = block * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        n = n + tl.arange(0, BLOCK_N)
    at = table + tl.maximum(tl.minimum(n, seq_len - 1), 0) // PAGE_SIZE
    if INTERPRETED:
        page = tl.load(at)
    else:
        # Not tl.load: the compiler would pipeline it through shared memory with the keys and wait for those too.
        page = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1)
    return page.to(tl.int64)


@triton.jit
def load_block(pages, page, number, seq_len, stride_page, stride_slot, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
               DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_D] keys or values; with MASKED zeros past the end of the sequence, whatever the page holds there."""
    n = number * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    slots = page * stride_page + (n % PAGE_SIZE) * stride_slot
    at = pages + slots[:, None] + d[None, :]
    if MASKED:
        live = (n < seq_len)[:, None]
        if BLOCK_D > DIM:
            live = live & (d < DIM)[None, :]
        block = tl.load(at, mask=live, other=0.0)
    elif BLOCK_D > DIM:
        block = tl.load(at, mask=(d < DIM)[None, :], other=0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def load_scales(scales, page, block, seq_len, stride_page, stride_slot, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """[BLOCK_N] scales of a block's slots; strides of 0 where pages or slots share one."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(scales + page * stride_page + (n % PAGE_SIZE) * stride_slot, mask=n < seq_len, other=0.0)


@triton.jit
def near_1(scales):
    """The factor that brings values' scales [N] near 1: weights times scales become float16, whose range is centred there.

    It is computed from a walk's first block only; scales 60000 times larger must be clamped.
    """
    highest = tl.max(scales, 0)
    return tl.where(highest > 1e-20, 1.0 / highest, 1.0)


@triton.jit
def scores(q, k, SWAP: tl.constexpr):
    """q [M, D] times k [N, D]: [M, N] float32, or its transpose with SWAP."""
    if SWAP:
        s = tl.dot(k, tl.trans(q))
    else:
        s = tl.dot(q, tl.trans(k))
    return s


@triton.jit
def power_of_2(x):
    """2^x with denormal results flushed to 0: one instruction instead of four."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def soften(s, top, scale, SWAP: tl.constexpr, MASKED: tl.constexpr):
    """A step of the running softmax: scores s [M, N] -> (weights 2^(s * scale - highest), factor of earlier sums, top).

    `top` is the highest score before scaling, which makes scaling free; `scale` is above 0. MASKED: masked scores are -inf,
    possibly all of a query. With SWAP s is [N, M].
    """
    AXIS: tl.constexpr = 0 if SWAP else 1
    higher = tl.maximum(top, tl.max(s, AXIS))
    base = higher * scale
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, base)
    return power_of_2(s * scale - tl.expand_dims(base, AXIS)), power_of_2(top * scale - base), higher


@triton.jit
def fold(s, v, v_scale, acc, top, total, scale, SCALED: tl.constexpr, SWAP: tl.constexpr, MASKED: tl.constexpr):
    """Adds one block to the running softmax. s [M, N] before scaling, v [N, Dv], v_scale [N] when SCALED, acc [M, Dv].

    With SWAP the long side of both products is the tensor core's row side: everything but v is transposed.
    """
    AXIS: tl.constexpr = 0 if SWAP else 1
    p, fade, top = soften(s, top, scale, SWAP, MASKED)
    total = total * fade + tl.sum(p, AXIS)
    if SCALED:
        p = p * tl.expand_dims(v_scale, 1 - AXIS)
    acc = acc * tl.expand_dims(fade, AXIS)
    if SWAP:
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, top, total


@triton.jit
def visible(block, seq_len, place, window, sink_tokens, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
            SWAP: tl.constexpr):  # fmt: skip
    """The mask of a block's slots for each query; `place` [M] is the query's position, -1 for padding."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.expand_dims(n, 1 if SWAP else 0)
    place = tl.expand_dims(place, 0 if SWAP else 1)
    keep = n <= place
    if WINDOWED:
        keep = keep & ((n > place - window) | (n < sink_tokens))
    return keep


@triton.jit
def visible_in_tree(block, seq_len, begins, bits, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """The mask of a block's slots for each query: those before `begins`, and of the new ones those whose bit is set in `bits` [M]."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.expand_dims(n, 1 if SWAP else 0)
    bits = tl.expand_dims(bits, 0 if SWAP else 1)
    among = n - begins
    shift = tl.minimum(tl.maximum(among, 0), 63).to(tl.int64)
    return (among < 0) | ((n < seq_len) & (((bits >> shift) & 1) == 1))


@triton.jit
def load_queries(at, real, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[M, BLOCK_D] queries from column FIRST on."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(at[:, None] + FIRST + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def add_sink(acc, top, total, sink):
    """Adds a score without a value, sink [M] (natural log), to the softmax sums of acc [M, Dv]."""
    sink = sink.to(tl.float32) * LOG2_E
    higher = tl.maximum(top, sink)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - base)
    return acc * fade[:, None], higher, total * fade + tl.exp2(sink - base)
