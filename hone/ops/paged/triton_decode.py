"""Decode attention over pages: the cache is divided into equal parts for a fixed number of programs, then merged.

Split-KV as in Flash-Decoding (Dao et al. 2023), divided as in Stream-K (Osama et al. 2023, arXiv:2301.03598): a tile is
one sequence's tokens and one key/value head; the blocks of keys of all tiles form one list, of which every program takes
an equal part, computed on the device from `seq_lens`. So the grid does not depend on the data (one CUDA graph serves all
lengths), and sequences of different lengths keep every multiprocessor busy to the end. A tile counts a third of a block
more than its blocks, the time that it takes to begin and to end: without that a program of many short sequences, as those
that pad a batch, ends late.

Legend: R sequences, KV key/value heads, G query heads of one key/value head, M = G * tokens queries of a tile (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from hone.ops.paged.triton_blocks import (
    LOG2_E,
    add_sink,
    fold,
    load_block,
    load_queries,
    page_ids,
    row_blocks,
    scores,
    visible,
    visible_in_tree,
)
from hone.ops.paged.triton_words import attend_words

_UNITS = tl.constexpr(3)
"""Units of the list that a block takes; a tile takes one more. On an H200 a block takes 1.9 us and a tile 0.7."""


@triton.jit
def _query_counts(query_lens, seqs, num_seqs, max_tokens, MANY: tl.constexpr):
    """New tokens of the sequences, and the same with 0 for those longer than `max_tokens`, which are not this kernel's."""
    counts = tl.where(seqs < num_seqs, 1, 0)
    if MANY:
        counts = tl.load(query_lens + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    return counts, tl.where(counts <= max_tokens, counts, 0)


@triton.jit
def _share(seq_lens, query_lens, num_seqs, max_tokens, window, sink_tokens, KV: tl.constexpr, SEQS: tl.constexpr,
           BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """(each sequence's end in the list of units [SEQS], new tokens [SEQS], units per program, this program's range)."""
    seqs = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    counts, own = _query_counts(query_lens, seqs, num_seqs, max_tokens, MANY)
    _, _, blocks = row_blocks(lens, own, window, sink_tokens, BLOCK_N, WINDOWED)
    ends = tl.cumsum(tl.where(own > 0, (blocks * _UNITS + 1) * KV, 0), 0)
    per = tl.cdiv(tl.max(ends, 0), tl.num_programs(0))
    begin = tl.program_id(0) * per
    return ends, counts, per, begin, tl.minimum(begin + per, tl.max(ends, 0))


@triton.jit(do_not_specialize=["num_seqs", "max_tokens", "table_row"])
def decode(q, k_pages, v_pages, table, seq_lens, query_lens, k_scales, v_scales, sinks, tree, out, part, part_lse, note,
           q_token, q_head, k_page, k_head, k_slot, v_page, v_head, v_slot, table_row, out_token, out_head,
           ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot,
           num_seqs, max_tokens, scale, window, sink_tokens,
           KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, DIM_V: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, SEQS: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
           MANY: tl.constexpr, SINKS: tl.constexpr, SWAP: tl.constexpr, INTEGER: tl.constexpr, TREE: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """One program: its part of the list of blocks, tile by tile.

    A tile that lies within the part goes to `out`; parts of other tiles, at most two, go to `part` [2P, M, Dv] and
    `part_lse` [2P, M] (base 2): entry 2p where the tile starts in an earlier program, 2p + 1 where it ends in a later one.
    `note` [P, 3] is the tile that starts in each program and ends in a later one: (programs, sequence, head), 0 if none.
    Pages of 8-bit numbers are passed as int32, four numbers each (see triton_words; INTEGER: int8, else float8), strides too.
    With TREE new token i attends to new token j where bit j of tree[i] is set.
    With ROPE_DIM > 0 pages hold latents: keys of DIM + ROPE_DIM columns whose first DIM are the values too.
    """
    NARROW: tl.constexpr = k_pages.dtype.element_ty == tl.int32
    pid = tl.program_id(0)
    ends, counts, per, begin, end = _share(seq_lens, query_lens, num_seqs, max_tokens, window, sink_tokens, KV, SEQS,
                                           BLOCK_N, WINDOWED, MANY)  # fmt: skip
    if EARLY:
        cuda.gdc_wait()  # launched while the previous kernel ends, which writes queries and keys but no lengths
        cuda.gdc_launch_dependents()
    m = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    tl.store(note + pid * 3, 0)
    while begin < end:
        seq = tl.sum((ends <= begin).to(tl.int32), 0)
        row_begin = tl.max(tl.where(ends <= begin, ends, 0), 0)
        seq_len = tl.load(seq_lens + seq).to(tl.int32)
        count = 1
        token = seq
        if MANY:
            count = tl.load(query_lens + seq).to(tl.int32)
            token = tl.sum(tl.where(tl.arange(0, SEQS) < seq, counts, 0), 0).to(tl.int32)
        kept, skipped, blocks = row_blocks(seq_len, count, window, sink_tokens, BLOCK_N, WINDOWED)
        units = blocks * _UNITS + 1
        head = (begin - row_begin) // units
        tile = row_begin + head * units
        stop = tl.minimum(end - tile, units)
        # A block belongs to the program that has its first unit; a part may be without blocks.
        first = tl.cdiv(tl.maximum(begin - tile - 1, 0), _UNITS)
        last = tl.cdiv(stop - 1, _UNITS)
        real = m < count * GROUP
        heads = head * GROUP + m % GROUP
        tokens = (token + m // GROUP).to(tl.int64)
        q_at = q + tokens * q_token + heads * q_head
        place = tl.where(real, seq_len - count + m // GROUP, -1)
        walk = (table + seq.to(tl.int64) * table_row, first, last, kept, skipped, seq_len)
        if NARROW:
            acc, top, total = attend_words(
                q_at, real, place, k_pages + head * k_head, v_pages + head * v_head, k_scales + head * ks_head,
                v_scales + head * vs_head, walk, scale * LOG2_E, window, sink_tokens, k_page, k_slot, v_page, v_slot,
                ks_page, ks_slot, vs_page, vs_slot,
                DIM, DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_M, BLOCK_N, STAGES, WINDOWED, MANY, INTEGER)  # fmt: skip
        else:
            bits = place.to(tl.int64)
            if TREE:
                bits = tl.load(tree + m // GROUP, mask=real, other=0)
            acc, top, total = _attend(
                q_at, real, place, seq_len - count, bits, k_pages + head * k_head, v_pages + head * v_head, walk, scale * LOG2_E,
                window, sink_tokens, k_page, k_slot, v_page, v_slot,
                DIM, ROPE_DIM, DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_M, BLOCK_N, STAGES, WINDOWED, SWAP, TREE)  # fmt: skip
        whole = (begin == tile) & (stop == units)
        # Two conditions, because the first is a compile-time constant.
        if SINKS:  # noqa: SIM102
            if whole:
                acc, top, total = add_sink(acc, top, total, tl.load(sinks + heads))
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if whole:
            out_at = out + tokens * out_token + heads * out_head
            tl.store(out_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty),
                     mask=real[:, None] & (dv < DIM_V)[None, :])  # fmt: skip
        else:
            entry = 2 * pid + tl.where(begin == tile, 1, 0)
            part_at = part + (entry * BLOCK_M + m) * BLOCK_DV
            tl.store(part_at[:, None] + dv[None, :], acc)
            tl.store(part_lse + entry * BLOCK_M + m, tl.where(total > 0, top + tl.log2(total), float("-inf")))
            if begin == tile:
                tl.store(note + pid * 3, (tile + units - 1) // per - pid + 1)
                tl.store(note + pid * 3 + 1, seq)
                tl.store(note + pid * 3 + 2, head)
        begin = tile + stop


@triton.jit
def _attend(q_at, real, place, begins, bits, k_pages, v_pages, walk, scale, window, sink_tokens, k_page, k_slot, v_page, v_slot,
            DIM: tl.constexpr, ROPE_DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
            PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
            WINDOWED: tl.constexpr, SWAP: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """(acc [M, Dv] before the division, highest score, sum) of a tile's blocks begin ... end - 1 of `walk`."""
    table, begin, end, kept, skipped, seq_len = walk
    queries = load_queries(q_at, real, 0, DIM, BLOCK_D)
    if ROPE_DIM > 0:
        q_rope = load_queries(q_at, real, DIM, ROPE_DIM, ROPE_DIM)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SWAP:
        acc = tl.zeros([BLOCK_DV, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    page = page_ids(table, tl.where(begin < kept, begin, begin + skipped), seq_len, BLOCK_N, PAGE_SIZE)
    for unit in tl.range(begin, end, num_stages=STAGES):
        block = tl.where(unit < kept, unit, unit + skipped)
        k = load_block(k_pages, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, DIM, BLOCK_D, True)
        s = scores(queries, k, SWAP)
        if ROPE_DIM > 0:
            # One load is both keys and values.
            v = k
            last = load_block(
                k_pages + DIM, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, ROPE_DIM, ROPE_DIM, True
            )
            s += scores(q_rope, last, SWAP)
        else:
            v = load_block(v_pages, page, block, seq_len, v_page, v_slot, BLOCK_N, PAGE_SIZE, DIM_V, BLOCK_DV, True)
        # The next block's page is loaded one iteration ahead to hide its latency.
        page = page_ids(table, tl.where(unit + 1 < kept, unit + 1, unit + 1 + skipped), seq_len, BLOCK_N, PAGE_SIZE)
        if TREE:
            keep = visible_in_tree(block, seq_len, begins, bits, BLOCK_N, SWAP)
        else:
            keep = visible(block, seq_len, place, window, sink_tokens, BLOCK_N, WINDOWED, SWAP)
        acc, top, total = fold(tl.where(keep, s, float("-inf")), v, 1.0, acc, top, total, scale, False, SWAP, True)
    if SWAP:
        acc = tl.trans(acc)
    return acc, top * scale, total


@triton.jit
def combine(part, part_lse, note, query_lens, sinks, out, out_token, out_head,
            GROUP: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, SEQS: tl.constexpr,
            SPLITS: tl.constexpr, MANY: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Merges the parts of the tile that starts in program p and ends in a later one, as `hone.ops.merge` does.

    Grid (P, M): one program per query of a tile.
    """
    pid = tl.program_id(0)
    m = tl.program_id(1)
    if EARLY:
        cuda.gdc_wait()  # launched while `decode` runs: wait for its writes
    programs = tl.load(note + pid * 3)
    if programs > 0:
        seq = tl.load(note + pid * 3 + 1)
        head = tl.load(note + pid * 3 + 2)
        count = 1
        token = seq
        if MANY:
            seqs = tl.arange(0, SEQS)
            count = tl.load(query_lens + seq).to(tl.int32)
            token = tl.sum(tl.load(query_lens + seqs, mask=seqs < seq, other=0), 0).to(tl.int32)
        if m < count * GROUP:
            dv = tl.arange(0, BLOCK_DV)
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([BLOCK_DV], tl.float32)
            for start in range(0, programs, SPLITS):
                split = start + tl.arange(0, SPLITS)
                live = split < programs
                places = (2 * (pid + split) + tl.where(split == 0, 1, 0)) * BLOCK_M + m
                lse = tl.load(part_lse + places, mask=live, other=float("-inf"))
                piece = tl.load(part + places[:, None] * BLOCK_DV + dv[None, :], mask=live[:, None], other=0.0)
                higher = tl.maximum(top, tl.max(lse, 0))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp2(lse - base)
                fade = tl.exp2(top - base)
                acc = acc * fade + tl.sum(piece * weight[:, None], 0)
                total = total * fade + tl.sum(weight, 0)
                top = higher
            if SINKS:
                sink = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32) * LOG2_E
                higher = tl.maximum(top, sink)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp2(top - base) + tl.exp2(sink - base)
                acc = acc * tl.exp2(top - base)
            acc = acc / tl.where(total > 0, total, 1.0)
            out_at = out + (token + m // GROUP).to(tl.int64) * out_token + (head * GROUP + m % GROUP) * out_head
            tl.store(out_at + dv, acc.to(out.dtype.element_ty), mask=dv < DIM_V)
