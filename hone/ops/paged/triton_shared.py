"""Decode attention of sequences that share their first pages: the shared keys are read once for all of their queries.

As in Hydragen (Juravsky et al. 2024, arXiv:2402.05099): `shared_parts` multiplies the queries of many sequences with the
shared keys, as many rows of a product as there are queries; `own_rest` attends to each sequence's own keys and merges.
Which sequences share how many pages is read on the device.

Legend: R sequences of one new token each, KV key/value heads, G query heads of one key/value head, S parts of the shared keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.dispatch import locate
from hone.ops.paged.triton_blocks import LOG2_E, fold, load_block, load_queries, page_ids, scores, visible


@triton.jit
def shared_parts(q, k_pages, v_pages, table, shared, part, part_lse, q_token, q_head, k_page, k_head, k_slot, v_page, v_head,
                 v_slot, table_row, num_heads, scale,
                 GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
                 S: tl.constexpr):  # fmt: skip
    """One tile of BLOCK_M // GROUP sequences, one key/value head, one part of the shared keys; grid (tiles, KV, S).

    part float32 [R, H, S, Dv] are the attentions over each part, part_lse [R, H, S] their log-sums (base 2).
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    begin = tl.load(shared)
    end = tl.load(shared + 1)
    seq_len = tl.load(shared + 2) * PAGE_SIZE
    first = begin + tl.program_id(0) * TOKENS
    if (seq_len > 0) & (first < end):
        head = tl.program_id(1)
        m = tl.arange(0, BLOCK_M)
        dv = tl.arange(0, BLOCK_DV)
        seqs = first + m // GROUP
        real = (m < TOKENS * GROUP) & (seqs < end)
        heads = head * GROUP + m % GROUP
        queries = load_queries(q + seqs.to(tl.int64) * q_token + heads * q_head, real, 0, DIM, BLOCK_D)
        place = tl.where(real, seq_len - 1, -1)
        table += begin.to(tl.int64) * table_row
        blocks = tl.cdiv(seq_len, BLOCK_N)
        per = tl.cdiv(blocks, S)
        start = tl.program_id(2) * per
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        page = page_ids(table, start, seq_len, BLOCK_N, PAGE_SIZE)
        for block in tl.range(start, tl.minimum(start + per, blocks), num_stages=STAGES):
            k = load_block(
                k_pages + head * k_head, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, DIM, BLOCK_D, True
            )
            v = load_block(
                v_pages + head * v_head, page, block, seq_len, v_page, v_slot, BLOCK_N, PAGE_SIZE, DIM_V, BLOCK_DV, True
            )
            page = page_ids(table, block + 1, seq_len, BLOCK_N, PAGE_SIZE)
            keep = visible(block, seq_len, place, 0, 0, BLOCK_N, False, False)
            s = tl.where(keep, scores(queries, k, False), float("-inf"))
            acc, top, total = fold(s, v, 1.0, acc, top, total, scale * LOG2_E, False, False, True)
        entry = (seqs.to(tl.int64) * num_heads + heads) * S + tl.program_id(2)
        lse = tl.where(total > 0, top * (scale * LOG2_E) + tl.log2(total), float("-inf"))
        tl.store(part_lse + entry, lse, mask=real)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(part + entry[:, None] * DIM_V + dv[None, :], acc, mask=real[:, None] & (dv < DIM_V)[None, :])


@triton.jit
def own_rest(q, k_pages, v_pages, table, seq_lens, shared, part, part_lse, out, q_token, q_head, k_page, k_head, k_slot, v_page,
             v_head, v_slot, table_row, out_token, out_head, num_heads, scale,
             GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
             S: tl.constexpr):  # fmt: skip
    """One sequence and key/value head: its keys after the shared ones, merged with the parts of `shared_parts`."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    inside = (seq >= tl.load(shared)) & (seq < tl.load(shared + 1))
    skipped = tl.where(inside, tl.load(shared + 2) * PAGE_SIZE, 0)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    real = m < GROUP
    heads = head * GROUP + m
    queries = load_queries(q + seq.to(tl.int64) * q_token + heads * q_head, real, 0, DIM, BLOCK_D)
    place = tl.where(real, seq_len - 1, -1)
    table += seq.to(tl.int64) * table_row
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    start = skipped // BLOCK_N
    page = page_ids(table, start, seq_len, BLOCK_N, PAGE_SIZE)
    for block in tl.range(start, tl.cdiv(seq_len, BLOCK_N), num_stages=STAGES):
        k = load_block(
            k_pages + head * k_head, page, block, seq_len, k_page, k_slot, BLOCK_N, PAGE_SIZE, DIM, BLOCK_D, True
        )
        v = load_block(
            v_pages + head * v_head, page, block, seq_len, v_page, v_slot, BLOCK_N, PAGE_SIZE, DIM_V, BLOCK_DV, True
        )
        page = page_ids(table, block + 1, seq_len, BLOCK_N, PAGE_SIZE)
        keep = visible(block, seq_len, place, 0, 0, BLOCK_N, False, False)
        keep = keep & (block * BLOCK_N + tl.arange(0, BLOCK_N) >= skipped)[None, :]
        s = tl.where(keep, scores(queries, k, False), float("-inf"))
        acc, top, total = fold(s, v, 1.0, acc, top, total, scale * LOG2_E, False, False, True)
    top = top * (scale * LOG2_E)
    if skipped > 0:
        entry = (seq.to(tl.int64) * num_heads + heads) * S
        for split in range(S):
            lse = tl.load(part_lse + entry + split, mask=real, other=float("-inf"))
            at = part + (entry + split)[:, None] * DIM_V + dv[None, :]
            piece = tl.load(at, mask=real[:, None] & (dv < DIM_V)[None, :], other=0.0)
            higher = tl.maximum(top, lse)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp2(top - base)
            weight = tl.exp2(lse - base)
            acc = acc * fade[:, None] + piece * weight[:, None]
            total = total * fade + weight
            top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + seq.to(tl.int64) * out_token + heads * out_head
    tl.store(out_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < DIM_V)[None, :])


def launch_shared(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, seq_lens: Tensor, shared: Tensor, scale: float
) -> Tensor:
    """`hone.ops.attend_shared`."""
    count, num_heads = q.shape[:2]
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    group, value_dim = num_heads // kv_heads, v_pages.shape[3]
    out = q.new_empty(count, num_heads, value_dim)
    if not count:
        return out
    page_table, seq_lens = page_table.int().contiguous(), seq_lens.contiguous()
    q, k_pages, v_pages = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k_pages, v_pages))
    rows, block_n = shared_tile(count, group, max(head_dim, value_dim))
    tiles = triton.cdiv(count, rows // group)
    splits = shared_splits(tiles * kv_heads, locate(q.device).num_sms)
    part = q.new_empty(count, num_heads, splits, value_dim, dtype=out.float().dtype)
    part_lse = part.new_empty(count, num_heads, splits)
    sizes = {
        "GROUP": group, "DIM": head_dim, "DIM_V": value_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_DV": triton.next_power_of_2(value_dim), "PAGE_SIZE": page_size, "S": splits,
    }  # fmt: skip
    strides = (*k_pages.stride()[:3], *v_pages.stride()[:3], page_table.stride(0))
    shared_parts[(tiles, kv_heads, splits)](
        q, k_pages, v_pages, page_table, shared, part, part_lse, *q.stride()[:2], *strides, num_heads, scale,
        BLOCK_M=rows, BLOCK_N=block_n, STAGES=3, num_warps=8 if rows >= 128 else 4, **sizes,
    )  # fmt: skip
    own_rest[(count, kv_heads)](
        q, k_pages, v_pages, page_table, seq_lens, shared, part, part_lse, out, *q.stride()[:2], *strides, *out.stride()[:2],
        num_heads, scale, BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_N=min(block_n, 32), STAGES=3, num_warps=4, **sizes,
    )  # fmt: skip
    return out


def shared_tile(count: int, group: int, width: int) -> tuple[int, int]:
    """(query rows, keys) of a tile of `shared_parts`: as many rows as there are, up to what registers hold."""
    most = 128 if width <= 128 else 64
    rows = max(16, min(most, triton.next_power_of_2(count * group)))
    return max(rows, triton.next_power_of_2(group)), 64 if width <= 128 else 32


def shared_splits(tiles: int, num_sms: int) -> int:
    """Parts of the shared keys, so that `tiles` times them fill the multiprocessors about once: a power of two up to 16."""
    splits = 1
    while splits < 16 and 2 * splits * tiles <= max(1, num_sms):
        splits *= 2
    return splits
