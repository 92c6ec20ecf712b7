"""The attention forward pass in plain Triton: any mask, head widths up to 256, keys and values of different width.

FlashAttention-2, arXiv:2307.08691: one program per tile of queries loops over its tiles of keys with a running maximum and
sum per row. It runs where the Gluon kernels do not: other GPUs, other widths, the interpreter.

A head width Dh that is no power of two is split into two pieces (192 = 128 + 64) to avoid products with padding;
descriptors of the tensors [B, S, heads, Dh] give zeros past every edge. Scores are in units of log2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hone.ops.attention.masks import Tiles, outer_strides

FULL: tl.constexpr = tl.constexpr(0)
CAUSAL: tl.constexpr = tl.constexpr(1)
LISTS: tl.constexpr = tl.constexpr(2)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n): queries and keys of a tile; neither exceeds `limit` unless that is 0."""
    block_m, block_n = (64, 64) if max(head_dim, v_dim) <= 128 else (64, 32)
    return (min(block_m, limit), min(block_n, limit)) if limit else (block_m, block_n)


# With several small programs per multiprocessor the softmax of one overlaps the products of another.
_LAUNCH = {"num_warps": 4, "num_stages": 3}


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, Dv] and lse [B, H, Sq] of q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv]; see `ops.attention`."""
    batch, seq_q, num_heads, head_dim = q.shape
    v_dim = v.shape[3]
    out = q.new_empty(batch, seq_q, num_heads, v_dim)
    lse = q.new_empty((batch, num_heads, seq_q), dtype=torch.float32)
    block_m, block_n = tiles.block_m, tiles.block_n
    (_, d1), (v0, v1) = pieces(head_dim), pieces(v_dim)
    grid = (triton.cdiv(seq_q, block_m) * num_heads * batch,)
    _forward_kernel[grid](
        *described(q, block_m),
        *described(k, block_n),
        *described(v, block_n),
        out,
        lse,
        *list_arguments(tiles),
        num_heads,
        seq_q,
        tiles.seq_k,
        scale,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        GROUP=num_heads // k.shape[2],
        D1=d1,
        V0=v0,
        V1=v1,
        V=v_dim,
        BM=block_m,
        BN=block_n,
        CAP=softcap,
        **mask_arguments(tiles),
        **_LAUNCH,
    )
    return out, lse


def pieces(width: int) -> tuple[int, int]:
    """A head's width as two powers of two from 16, the second 0 when the first is enough; together at least `width`."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, (max(16, triton.next_power_of_2(width - first)) if width > first else 0)


def described(made: Tensor, block: int) -> tuple[Any, Any]:
    """Descriptors of both pieces of tiles of `block` rows of [B, S, heads, Dh]."""
    first, second = pieces(made.shape[3])
    shape, strides = list(made.shape), list(made.stride())
    return (
        TensorDescriptor(made, shape, strides, [1, block, 1, first]),
        TensorDescriptor(made, shape, strides, [1, block, 1, second or first]),
    )


def list_arguments(tiles: Tiles) -> tuple[Any, ...]:
    """The forward lists, the data, and the strides of each along batch and heads."""
    strides = (*outer_strides(tiles.kv_count), *outer_strides(tiles.q_data), *outer_strides(tiles.k_data))
    return tiles.kv_count, tiles.kv_index, tiles.kv_partial, tiles.q_data, tiles.k_data, strides


def mask_arguments(tiles: Tiles) -> dict[str, Any]:
    """The compile-time arguments of the mask."""
    kind = CAUSAL if tiles.causal else FULL if tiles.full else LISTS
    listed = kind == LISTS
    return {
        "KIND": kind.value,
        "RULE": tiles.triton_rule() if listed else None,
        "PARAMS": tiles.params if listed else (),
        "Q_DATA": listed and tiles.q_data is not None,
        "K_DATA": listed and tiles.k_data is not None,
    }


@triton.jit
def tile_of(desc, b, place, head, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `place` ... of one head as [ROWS, WIDTH], zeros past the edges."""
    return desc.load([b, place, head, column]).reshape(ROWS, WIDTH)


@triton.jit
def kept(
    q, k, q_values, k_data, seq_k, KIND: tl.constexpr, RULE: tl.constexpr, PARAMS: tl.constexpr, K_DATA: tl.constexpr
):
    """The mask of a tile's pairs: q (positions) and q_values [BM, 1], k [1, BN]."""
    inside = k < seq_k
    if KIND == 0:
        keep = inside
    elif KIND == 1:
        keep = inside & (q >= k)
    else:
        k_values = 0
        if K_DATA:
            k_values = tl.load(k_data + k, mask=inside, other=0)
        keep = inside & RULE(q, k, q_values, k_values, PARAMS)
    return keep


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP); tanh from exp2, which every target has."""
    return CAP - 2 * CAP / (tl.exp2(scores * (2 * LOG2E / CAP)) + 1)


@triton.jit
def spans(m, count, partial, seq_q, seq_k, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr):
    """The tiles of keys of query tile m: [begin, end) masked, [whole_begin, whole_end) not."""
    if KIND == 2:
        begin = 0
        end = tl.load(partial + m)
        whole_begin = end
        whole_end = tl.load(count + m)
    else:
        whole_begin = 0
        whole_end = seq_k // BN
        begin = whole_end
        end = tl.cdiv(seq_k, BN)
        if KIND == 1:
            first = m * BM + seq_k - seq_q
            last = tl.minimum(first + BM, seq_k)
            whole_end = tl.minimum(whole_end, tl.maximum(first + 1, 0) // BN)
            begin = whole_end
            end = tl.minimum(end, tl.cdiv(tl.maximum(last, 0), BN))
    return begin, end, whole_begin, whole_end


@triton.jit
def _walk(
    acc0, acc1, highest, total, q0, q1, k_desc, k_rest, v_desc, v_rest, index, begin, end, b, head, q, q_values, k_data, seq_k, scale,
    D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    KIND: tl.constexpr, RULE: tl.constexpr, PARAMS: tl.constexpr, K_DATA: tl.constexpr,
):  # fmt: skip
    D0: tl.constexpr = q0.shape[1]
    for j in tl.range(begin, end):
        n = j
        if KIND == 2:
            n = tl.load(index + j)
        place = n * BN
        scores = tl.dot(q0, tile_of(k_desc, b, place, head, 0, BN, D0).T)
        if D1 > 0:
            scores = tl.dot(q1, tile_of(k_rest, b, place, head, D0, BN, D1).T, scores)
        unit = scale * LOG2E
        if CAP is not None:
            scores = capped(scores * scale, CAP)
            unit = LOG2E
        if MASKED:
            k = place + tl.arange(0, BN)[None, :]
            scores = tl.where(kept(q, k, q_values, k_data, seq_k, KIND, RULE, PARAMS, K_DATA), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * unit)
        floor = higher
        if MASKED:  # a row without keys so far must not compute -inf - -inf
            floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * unit - floor[:, None])
        shrink = tl.exp2(highest - floor)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
        weights = weights.to(q0.dtype)
        acc0 = tl.dot(weights, tile_of(v_desc, b, place, head, 0, BN, V0), acc0 * shrink[:, None])
        if V1 > 0:
            acc1 = tl.dot(weights, tile_of(v_rest, b, place, head, V0, BN, V1), acc1 * shrink[:, None])
    return acc0, acc1, highest, total


@triton.jit
def _forward_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, out, lse, count, index, partial, q_data, k_data, strides,
    num_heads, seq_q, seq_k, scale, out_b, out_s, out_h,
    GROUP: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, PARAMS: tl.constexpr,
    Q_DATA: tl.constexpr, K_DATA: tl.constexpr,
):  # fmt: skip
    D0: tl.constexpr = q_desc.block_shape[3]
    num_m = tl.cdiv(seq_q, BM)
    # Heads are the outer loop, so that concurrent programs share keys in L2; under a causal mask the longest come first.
    bh = tl.program_id(0) // num_m
    m = num_m - 1 - tl.program_id(0) % num_m
    b = bh // num_heads
    h = bh % num_heads
    rows = m * BM + tl.arange(0, BM)
    q = (rows + (seq_k - seq_q))[:, None]
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
    q0 = tile_of(q_desc, b, m * BM, h, 0, BM, D0)
    q1 = q0
    if D1 > 0:
        q1 = tile_of(q_rest, b, m * BM, h, D0, BM, D1)
    acc0 = tl.zeros([BM, V0], tl.float32)
    acc1 = tl.zeros([BM, V1 if V1 > 0 else 16], tl.float32)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc0, acc1, highest, total = _walk(
        acc0, acc1, highest, total, q0, q1, k_desc, k_rest, v_desc, v_rest, index, begin, end, b, h // GROUP, q, q_values, k_data,
        seq_k, scale, D1, V0, V1, BN, CAP, True, KIND, RULE, PARAMS, K_DATA,
    )  # fmt: skip
    acc0, acc1, highest, total = _walk(
        acc0, acc1, highest, total, q0, q1, k_desc, k_rest, v_desc, v_rest, index, whole_begin, whole_end, b, h // GROUP, q,
        q_values, k_data, seq_k, scale, D1, V0, V1, BN, CAP, False, KIND, RULE, PARAMS, K_DATA,
    )  # fmt: skip
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    inside = rows < seq_q
    tl.store(
        lse + bh.to(tl.int64) * seq_q + rows,
        tl.where(blind, float("-inf"), (highest + tl.log2(total)) * LN2),
        mask=inside,
    )
    where = out + b.to(tl.int64) * out_b + h * out_h + rows.to(tl.int64)[:, None] * out_s
    columns = tl.arange(0, V0)[None, :]
    tl.store(where + columns, (acc0 / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (columns < V))
    if V1 > 0:
        rest = V0 + tl.arange(0, V1)[None, :]
        tl.store(where + rest, (acc1 / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (rest < V))
