"""Prefill attention over pages: tiles of queries of ragged sequences, which read the pages in place.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) with the query heads of one key/value head packed into one tile, so that
keys are read once for all of them. The sequence of a tile is found on the device; the grid is the largest number of tiles
that the tokens could need. Blocks that every query of the tile attends to in full need no mask.

Legend: R sequences, KV key/value heads, G query heads of one key/value head, M = tokens of a tile * G (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops.paged.triton_blocks import (
    LOG2_E,
    add_sink,
    fold,
    load_block,
    load_queries,
    load_scales,
    near_1,
    page_ids,
    scores,
    visible,
)


@triton.jit
def tile_of(query_lens, num_seqs, min_tokens, tile, SEQS: tl.constexpr, TOKENS: tl.constexpr):
    """(sequence, its first token, first token of the tile in it) of tile number `tile`; sequence -1 past the end.

    Only sequences of at least `min_tokens` new tokens have tiles here.
    """
    seqs = tl.arange(0, SEQS)
    counts = tl.load(query_lens + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    tiles = tl.where(counts >= min_tokens, tl.cdiv(counts, TOKENS), 0)
    ends = tl.cumsum(tiles, 0)
    seq = tl.sum((ends <= tile).to(tl.int32), 0)
    token = tl.sum(tl.where(seqs < seq, counts, 0), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    return tl.where(tile < tl.max(ends, 0), seq, -1), token, (tile - before) * TOKENS


@triton.jit
def _ranges(low, high, window, sink_tokens, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """(sink blocks, first block, first whole, end of whole, end) of the blocks for queries at positions low ... high."""
    kept = 0
    first = 0
    whole = 0
    end = high // BLOCK_N + 1
    if WINDOWED:
        first = tl.maximum(low - window + 1, 0) // BLOCK_N
        kept = tl.minimum(tl.cdiv(sink_tokens, BLOCK_N), first)
        whole = tl.minimum(tl.cdiv(tl.maximum(high - window + 1, 0), BLOCK_N), end)
    return kept, first, whole, tl.maximum((low + 1) // BLOCK_N, whole), end


@triton.jit
def _walk(queries, place, k_pages, v_pages, table, k_scales, v_scales, acc, top, total, begin, stop, kept, edge, skip_kept,
          skip_edge, seq_len, scale, to_1, window, sink_tokens, k_page, k_slot, v_page, v_slot, ks_page, ks_slot, vs_page, vs_slot,
          DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
          BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, SCALED: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Adds units begin ... stop - 1 to the running softmax: block = unit below `kept`, + `skip_kept` up to `edge`, + `skip_edge` after it."""
    block = begin + tl.where(begin < kept, 0, tl.where(begin < edge, skip_kept, skip_edge))
    page = page_ids(table, block, seq_len, BLOCK_N, PAGE_SIZE)
    for unit in tl.range(begin, stop, num_stages=STAGES):
        block = unit + tl.where(unit < kept, 0, tl.where(unit < edge, skip_kept, skip_edge))
        k = load_block(k_pages, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, DIM, BLOCK_D, MASKED)
        s = scores(queries, k.to(queries.dtype), False)
        v = load_block(v_pages, page, block, seq_len, v_page, v_slot, BLOCK_N, PAGE_SIZE, DIM_V, BLOCK_DV, MASKED)
        k_scale = 1.0
        v_scale = 1.0
        if SCALED:
            k_scale = load_scales(k_scales, page, block, seq_len, ks_page, ks_slot, BLOCK_N, PAGE_SIZE)
            v_scale = load_scales(v_scales, page, block, seq_len, vs_page, vs_slot, BLOCK_N, PAGE_SIZE)
            v_scale = tl.minimum(v_scale * to_1, 60000.0)
        later = unit + 1
        later += tl.where(later < kept, 0, tl.where(later < edge, skip_kept, skip_edge))
        page = page_ids(table, later, seq_len, BLOCK_N, PAGE_SIZE)
        if SCALED:
            s = s * k_scale[None, :]
        if MASKED:
            keep = visible(block, seq_len, place, window, sink_tokens, BLOCK_N, WINDOWED, False)
            s = tl.where(keep, s, float("-inf"))
        acc, top, total = fold(s, v.to(queries.dtype), v_scale, acc, top, total, scale, SCALED, False, MASKED)
    return acc, top, total


@triton.jit(do_not_specialize=["num_seqs", "min_tokens", "table_row"])
def prefill(q, k_pages, v_pages, table, seq_lens, query_lens, k_scales, v_scales, sinks, out,
            q_token, q_head, k_page, k_head, k_slot, v_page, v_head, v_slot, table_row, out_token, out_head,
            ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot,
            num_seqs, min_tokens, scale, window, sink_tokens,
            GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
            PAGE_SIZE: tl.constexpr, SEQS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            STAGES: tl.constexpr, WINDOWED: tl.constexpr, SCALED: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """One tile of BLOCK_M // GROUP tokens of one sequence and key/value head; grid (tiles, KV), late (long) tiles first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    seq, token, begin = tile_of(
        query_lens, num_seqs, min_tokens, tl.num_programs(0) - 1 - tl.program_id(0), SEQS, TOKENS
    )
    head = tl.program_id(1)
    if seq < 0:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    count = tl.load(query_lens + seq).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    steps = begin + m // GROUP
    real = (m < TOKENS * GROUP) & (steps < count)
    heads = head * GROUP + m % GROUP
    tokens = (token + steps).to(tl.int64)
    q_at = q + tokens * q_token + heads * q_head
    queries = load_queries(q_at, real, 0, DIM, BLOCK_D)
    if k_pages.dtype.element_ty.primitive_bitwidth == 8:
        queries = queries.to(tl.float16)  # holds every 8-bit number exactly
    low = seq_len - count + begin
    high = tl.minimum(low + TOKENS, seq_len) - 1
    place = tl.where(real, seq_len - count + steps, -1)
    kept, first, whole, end_whole, end = _ranges(low, high, window, sink_tokens, BLOCK_N, WINDOWED)
    k_pages += head * k_head
    v_pages += head * v_head
    k_scales += head * ks_head
    v_scales += head * vs_head
    table += seq.to(tl.int64) * table_row
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    to_1 = 1.0
    if SCALED:
        page = page_ids(table, first, seq_len, BLOCK_N, PAGE_SIZE)
        to_1 = near_1(load_scales(v_scales, page, first, seq_len, vs_page, vs_slot, BLOCK_N, PAGE_SIZE))
    acc, top, total = _walk(
        queries, place, k_pages, v_pages, table, k_scales, v_scales, acc, top, total, whole, end_whole, end, end, 0, 0,
        seq_len, scale * LOG2_E, to_1, window, sink_tokens, k_page, k_slot, v_page, v_slot, ks_page, ks_slot, vs_page, vs_slot,
        DIM, DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, SCALED, False)  # fmt: skip
    # The masked rest, in any order: sinks, the window's edge, the diagonal.
    edge = kept + tl.maximum(whole - first, 0)
    acc, top, total = _walk(
        queries, place, k_pages, v_pages, table, k_scales, v_scales, acc, top, total, 0, edge + end - end_whole, kept, edge,
        first - kept, end_whole - edge, seq_len, scale * LOG2_E, to_1, window, sink_tokens, k_page, k_slot, v_page, v_slot,
        ks_page, ks_slot, vs_page, vs_slot,
        DIM, DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, SCALED, True)  # fmt: skip
    if SINKS:
        acc, top, total = add_sink(acc, top * scale * LOG2_E, total, tl.load(sinks + heads))
    acc = acc / (tl.where(total > 0, total, 1.0) * to_1)[:, None]
    out_at = out + tokens * out_token + heads * out_head
    tl.store(out_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < DIM_V)[None, :])
