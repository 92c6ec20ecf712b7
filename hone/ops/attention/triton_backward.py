"""The attention backward pass in plain Triton, without atomics: gradients are bit-equal from run to run.

FlashAttention-2, arXiv:2307.08691, in three passes: delta = rowsum(out * d_out) - d_lse; dk and dv, one program per tile of
keys, which loops over the queries that attend to it in every query head that shares the key head; dq, one program per tile
of queries. The last two both compute the scores, the price of avoiding atomics. For heads wider than 192 a program reads
its own keys again at every step (AGAIN), because they do not fit in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.attention.masks import Tiles, outer_strides
from hone.ops.attention.triton_forward import (
    LOG2E,
    capped,
    described,
    kept,
    list_arguments,
    mask_arguments,
    pieces,
    spans,
    tile_of,
)


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n) of both passes; neither is larger than `limit` unless that is 0."""
    return (min(64, limit), min(64, limit)) if limit else (64, 64)


def launch_options(head_dim: int, v_dim: int, block_n: int) -> dict[str, int]:
    """num_warps and num_stages of both passes."""
    # As in the forward pass small programs are fastest, up to the width at which registers run out.
    width = max(head_dim, v_dim)
    return {"num_warps": 8 if width > 128 and block_n >= 64 else 4, "num_stages": 1 if 128 < width <= 192 else 2}


def reads_again(head_dim: int, v_dim: int) -> dict[str, bool]:
    """Whether each of the two main passes reads its own tile again at every step (AGAIN)."""
    return {"dkdv": max(head_dim, v_dim) > 192, "dq": False}


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    tiles: Tiles,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the layouts of q, k, v (contiguous); see `ops.attention`. `tiles` has the transposed lists too."""
    batch, seq_q, num_heads, head_dim = q.shape
    seq_k, num_kv_heads, v_dim = v.shape[1:]
    dq, dk, dv = (made.new_empty(made.shape) for made in (q, k, v))
    delta = torch.empty_like(lse)
    rows = batch * seq_q * num_heads
    _delta_kernel[(triton.cdiv(rows, 16),)](
        out, d_out, lse if d_lse is None else d_lse.contiguous(), delta, rows, num_heads, seq_q, *d_out.stride()[:3],
        V=v_dim, WIDTH=triton.next_power_of_2(v_dim), HAS_LSE=d_lse is not None, ROWS=16,
    )  # fmt: skip
    block_m, block_n = tiles.block_m, tiles.block_n
    described_all = (*described(q, block_m), *described(k, block_n), *described(v, block_n), *described(d_out, block_m))
    (d0, d1), (v0, v1) = pieces(head_dim), pieces(v_dim)
    shared: dict[str, Any] = {
        "GROUP": num_heads // num_kv_heads, "D0": d0, "D1": d1, "D": head_dim, "V0": v0, "V1": v1, "V": v_dim, "BM": block_m,
        "BN": block_n, "CAP": softcap, **mask_arguments(tiles), **launch_options(head_dim, v_dim, block_n),
    }  # fmt: skip
    sizes = (num_heads, seq_q, seq_k, scale)
    again = reads_again(head_dim, v_dim)
    strides = (*outer_strides(tiles.q_count), *outer_strides(tiles.q_data), *outer_strides(tiles.k_data))
    transposed = (tiles.q_count, tiles.q_index, tiles.q_partial, tiles.q_data, tiles.k_data, strides)
    grid = (triton.cdiv(seq_k, block_n) * num_kv_heads * batch,)
    _dkdv_kernel[grid](*described_all, lse, delta, dk, dv, *transposed, *sizes, **shared, AGAIN=again["dkdv"])
    grid = (triton.cdiv(seq_q, block_m) * num_heads * batch,)
    _dq_kernel[grid](*described_all, lse, delta, dq, *list_arguments(tiles), *sizes, **shared, AGAIN=again["dq"])
    return dq, dk, dv


@triton.jit
def _delta_kernel(
    out, d_out, d_lse, delta, num_rows, num_heads, seq_q, d_out_b, d_out_s, d_out_h,
    V: tl.constexpr, WIDTH: tl.constexpr, HAS_LSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Rows in out's own order [B, Sq, H], so that memory is read in order; delta is [B, H, Sq].
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    h = row % num_heads
    i = row // num_heads % seq_q
    b = row // num_heads // seq_q
    columns = tl.arange(0, WIDTH)
    keep = inside[:, None] & (columns < V)[None, :]
    o = tl.load(out + row[:, None] * V + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    where = d_out + (b * d_out_b + i * d_out_s + h * d_out_h)[:, None] + columns[None, :]
    total = tl.sum(o * tl.load(where, mask=keep, other=0.0).to(tl.float32), 1)
    place = (b * num_heads + h) * seq_q + i
    if HAS_LSE:
        total -= tl.load(d_lse + place, mask=inside, other=0.0)
    tl.store(delta + place, total, mask=inside)


@triton.jit
def _row_stats(lse, delta, rows, seq_q):
    """(lse in log2, delta) of query rows; +inf for rows past the end and rows without keys, so that their weights are 0."""
    inside = rows < seq_q
    level = tl.load(lse + rows, mask=inside, other=float("inf")) * LOG2E
    level = tl.where(level == float("-inf"), float("inf"), level)
    return level, tl.load(delta + rows, mask=inside, other=0.0)


@triton.jit
def _grads(scores, level, upstream, delta, keep, scale, CAP: tl.constexpr, MASKED: tl.constexpr):
    """The softmax's weights of raw scores q k^T and the grads by q k^T * scale; level and delta broadcast."""
    if CAP is not None:
        bent = capped(scores * scale, CAP)
        weights = tl.exp2(bent * LOG2E - level)
    else:
        weights = tl.exp2(scores * (scale * LOG2E) - level)
    if MASKED:
        weights = tl.where(keep, weights, 0.0)
    grads = weights * (upstream - delta)
    if CAP is not None:
        grads *= 1 - (bent / CAP) * (bent / CAP)
    return weights, grads


@triton.jit
def _spans_of_keys(n, count, partial, seq_q, seq_k, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr):
    """The tiles of queries that attend to key tile n: [begin, end) masked, [whole_begin, whole_end) not."""
    if KIND == 2:
        begin = 0
        end = tl.load(partial + n)
        whole_begin = end
        whole_end = tl.load(count + n)
    else:
        begin = 0
        # An incomplete last tile of keys is masked throughout, one of queries never (the weights of rows past the end are 0).
        whole_begin = tl.where((n + 1) * BN > seq_k, tl.cdiv(seq_q, BM), 0)
        whole_end = tl.cdiv(seq_q, BM)
        if KIND == 1:
            shift = seq_k - seq_q
            begin = tl.minimum(tl.maximum(n * BN - shift, 0) // BM, whole_end)
            whole_begin = tl.maximum(whole_begin, tl.cdiv(tl.maximum(n * BN + BN - 1 - shift, 0), BM))
            whole_begin = tl.maximum(tl.minimum(whole_begin, whole_end), begin)
        end = whole_begin
    return begin, end, whole_begin, whole_end


@triton.jit
def _loaded(
    boxes, b, place, head, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr
):
    """Rows `place` ... of two tensors by their four descriptors, in two pieces each (the first twice without a second)."""
    x0 = tile_of(boxes[0], b, place, head, 0, ROWS, D0)
    y0 = tile_of(boxes[2], b, place, head, 0, ROWS, V0)
    x1 = x0
    y1 = y0
    if D1 > 0:
        x1 = tile_of(boxes[1], b, place, head, D0, ROWS, D1)
    if V1 > 0:
        y1 = tile_of(boxes[3], b, place, head, V0, ROWS, V1)
    return x0, x1, y0, y1


@triton.jit
def _walk_queries(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, keys, queries, lse, delta, index, begin, end, b, h, kv, n, q_data, k_data, seq_q, seq_k,
    scale, D1: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr,
    RULE: tl.constexpr, PARAMS: tl.constexpr, Q_DATA: tl.constexpr, K_DATA: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = k0.shape[0]
    D0: tl.constexpr = k0.shape[1]
    V0: tl.constexpr = v0.shape[1]
    k = (n * BN + tl.arange(0, BN))[:, None]
    for j in tl.range(begin, end):
        m = j
        if KIND == 2:
            m = tl.load(index + j)
        rows = m * BM + tl.arange(0, BM)
        if AGAIN:
            k0, k1, v0, v1 = _loaded(keys, b, n * BN, kv, BN, D0, D1, V0, V1)
        q0, q1, g0, g1 = _loaded(queries, b, m * BM, h, BM, D0, D1, V0, V1)
        scores = tl.dot(k0, q0.T)
        if D1 > 0:
            scores = tl.dot(k1, q1.T, scores)
        upstream = tl.dot(v0, g0.T)
        if V1 > 0:
            upstream = tl.dot(v1, g1.T, upstream)
        level, drop = _row_stats(lse, delta, rows, seq_q)
        keep = True
        if MASKED:
            q_values = 0
            if Q_DATA:
                q_values = tl.load(q_data + rows, mask=rows < seq_q, other=0)[None, :]
            keep = kept((rows + (seq_k - seq_q))[None, :], k, q_values, k_data, seq_k, KIND, RULE, PARAMS, K_DATA)
        weights, grads = _grads(scores, level[None, :], upstream, drop[None, :], keep, scale, CAP, MASKED)
        weights = weights.to(k0.dtype)
        grads = grads.to(k0.dtype)
        dv0 = tl.dot(weights, g0, dv0)
        dk0 = tl.dot(grads, q0, dk0)
        if V1 > 0:
            dv1 = tl.dot(weights, g1, dv1)
        if D1 > 0:
            dk1 = tl.dot(grads, q1, dk1)
    return dk0, dk1, dv0, dv1


@triton.jit
def _store(to, value0, value1, rows, num_rows, stride, W0: tl.constexpr, W1: tl.constexpr, W: tl.constexpr):
    """Rows of a contiguous gradient: both pieces of W columns, `stride` elements from row to row."""
    inside = (rows < num_rows)[:, None]
    where = to + rows.to(tl.int64)[:, None] * stride
    columns = tl.arange(0, W0)[None, :]
    tl.store(where + columns, value0.to(to.dtype.element_ty), mask=inside & (columns < W))
    if W1 > 0:
        rest = W0 + tl.arange(0, W1)[None, :]
        tl.store(where + rest, value1.to(to.dtype.element_ty), mask=inside & (rest < W))


@triton.jit
def _dkdv_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, d_desc, d_rest, lse, delta, dk, dv, count, index, partial, q_data, k_data,
    strides, num_heads, seq_q, seq_k, scale,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr,
    PARAMS: tl.constexpr, Q_DATA: tl.constexpr, K_DATA: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(seq_k, BN)
    num_kv = num_heads // GROUP
    # Under a causal mask the first tile of keys has the most queries: the longest come first.
    bh = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n
    b = bh // num_kv
    kv = bh % num_kv
    rows = n * BN + tl.arange(0, BN)
    keys = (k_desc, k_rest, v_desc, v_rest)
    queries = (q_desc, q_rest, d_desc, d_rest)
    k0, k1, v0, v1 = _loaded(keys, b, n * BN, kv, BN, D0, D1, V0, V1)
    dk0 = tl.zeros([BN, D0], tl.float32)
    dk1 = tl.zeros([BN, D1 if D1 > 0 else 16], tl.float32)
    dv0 = tl.zeros([BN, V0], tl.float32)
    dv1 = tl.zeros([BN, V1 if V1 > 0 else 16], tl.float32)
    for g in range(GROUP):
        h = kv * GROUP + g
        line = (b * num_heads + h).to(tl.int64) * seq_q
        here = b * strides[0] + h * strides[1]
        to_index = index
        to_q = q_data
        to_k = k_data
        to_count = count
        to_partial = partial
        if KIND == 2:
            to_index = index + (here + n).to(tl.int64) * tl.cdiv(seq_q, BM)
            to_count = count + here
            to_partial = partial + here
            if Q_DATA:
                to_q = q_data + b * strides[2] + h * strides[3]
            if K_DATA:
                to_k = k_data + b * strides[4] + h * strides[5]
        begin, end, whole_begin, whole_end = _spans_of_keys(n, to_count, to_partial, seq_q, seq_k, BM, BN, KIND)
        dk0, dk1, dv0, dv1 = _walk_queries(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, keys, queries, lse + line, delta + line, to_index, begin, end, b, h, kv, n,
            to_q, to_k, seq_q, seq_k, scale, D1, V1, BM, CAP, True, KIND, RULE, PARAMS, Q_DATA, K_DATA, AGAIN,
        )  # fmt: skip
        dk0, dk1, dv0, dv1 = _walk_queries(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, keys, queries, lse + line, delta + line, to_index, whole_begin, whole_end, b, h, kv, n,
            to_q, to_k, seq_q, seq_k, scale, D1, V1, BM, CAP, False, KIND, RULE, PARAMS, Q_DATA, K_DATA, AGAIN,
        )  # fmt: skip
    first = b.to(tl.int64) * seq_k * num_kv + kv
    _store(dk + first * D, dk0 * scale, dk1 * scale, rows, seq_k, num_kv * D, D0, D1, D)
    _store(dv + first * V, dv0, dv1, rows, seq_k, num_kv * V, V0, V1, V)


@triton.jit
def _walk_keys(
    dq0, dq1, q0, q1, g0, g1, keys, queries, level, drop, index, begin, end, b, h, kv, m, q_values, k_data, seq_q, seq_k, scale,
    D1: tl.constexpr, V1: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    KIND: tl.constexpr, RULE: tl.constexpr, PARAMS: tl.constexpr, K_DATA: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = q0.shape[0]
    D0: tl.constexpr = q0.shape[1]
    V0: tl.constexpr = g0.shape[1]
    q = (m * BM + tl.arange(0, BM) + (seq_k - seq_q))[:, None]
    for j in tl.range(begin, end):
        n = j
        if KIND == 2:
            n = tl.load(index + j)
        if AGAIN:
            q0, q1, g0, g1 = _loaded(queries, b, m * BM, h, BM, D0, D1, V0, V1)
        k0, k1, v0, v1 = _loaded(keys, b, n * BN, kv, BN, D0, D1, V0, V1)
        scores = tl.dot(q0, k0.T)
        if D1 > 0:
            scores = tl.dot(q1, k1.T, scores)
        upstream = tl.dot(g0, v0.T)
        if V1 > 0:
            upstream = tl.dot(g1, v1.T, upstream)
        keep = True
        if MASKED:
            k = n * BN + tl.arange(0, BN)[None, :]
            keep = kept(q, k, q_values, k_data, seq_k, KIND, RULE, PARAMS, K_DATA)
        _, grads = _grads(scores, level[:, None], upstream, drop[:, None], keep, scale, CAP, MASKED)
        grads = grads.to(q0.dtype)
        dq0 = tl.dot(grads, k0, dq0)
        if D1 > 0:
            dq1 = tl.dot(grads, k1, dq1)
    return dq0, dq1


@triton.jit
def _dq_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, d_desc, d_rest, lse, delta, dq, count, index, partial, q_data, k_data,
    strides, num_heads, seq_q, seq_k, scale,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr,
    PARAMS: tl.constexpr, Q_DATA: tl.constexpr, K_DATA: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(seq_q, BM)
    bh = tl.program_id(0) // num_m
    m = num_m - 1 - tl.program_id(0) % num_m
    b = bh // num_heads
    h = bh % num_heads
    rows = m * BM + tl.arange(0, BM)
    q_values = 0
    if KIND == 2:
        row = b * strides[0] + h * strides[1]
        index += (row + m).to(tl.int64) * tl.cdiv(seq_k, BN)
        count += row
        partial += row
        if K_DATA:
            k_data += b * strides[4] + h * strides[5]
        if Q_DATA:
            q_values = tl.load(q_data + b * strides[2] + h * strides[3] + rows, mask=rows < seq_q, other=0)[:, None]
    begin, end, whole_begin, whole_end = spans(m, count, partial, seq_q, seq_k, BM, BN, KIND)
    keys = (k_desc, k_rest, v_desc, v_rest)
    queries = (q_desc, q_rest, d_desc, d_rest)
    q0, q1, g0, g1 = _loaded(queries, b, m * BM, h, BM, D0, D1, V0, V1)
    line = bh.to(tl.int64) * seq_q
    level, drop = _row_stats(lse + line, delta + line, rows, seq_q)
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = tl.zeros([BM, D1 if D1 > 0 else 16], tl.float32)
    dq0, dq1 = _walk_keys(
        dq0, dq1, q0, q1, g0, g1, keys, queries, level, drop, index, begin, end, b, h, h // GROUP, m, q_values, k_data,
        seq_q, seq_k, scale, D1, V1, BN, CAP, True, KIND, RULE, PARAMS, K_DATA, AGAIN,
    )  # fmt: skip
    dq0, dq1 = _walk_keys(
        dq0, dq1, q0, q1, g0, g1, keys, queries, level, drop, index, whole_begin, whole_end, b, h, h // GROUP, m, q_values, k_data,
        seq_q, seq_k, scale, D1, V1, BN, CAP, False, KIND, RULE, PARAMS, K_DATA, AGAIN,
    )  # fmt: skip
    first = b.to(tl.int64) * seq_q * num_heads + h
    _store(dq + first * D, dq0 * scale, dq1 * scale, rows, seq_q, num_heads * D, D0, D1, D)
