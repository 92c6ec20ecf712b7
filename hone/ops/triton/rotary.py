"""Rotary positions: turns queries and keys where they lie, and files keys and values in pages in the same pass."""

import triton
import triton.language as tl


@triton.jit
def rope_rows(
    x, out, cos, sin, x_token, x_head, out_token, out_head, angle_stride, angle_rows, num_heads, half, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out = x [T, heads, 2 * half] turned by the angles cos, sin [angle_rows, half] of row t % angle_rows.

    `sign` -1 turns back. `out` may be `x`: a program reads all it writes before it writes.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    angle = token % angle_rows
    first, second, inside = _turned(
        x + token * x_token, cos, sin, angle, x_head, angle_stride, heads, num_heads, half, sign, HALF
    )
    at = out + token * out_token + heads * out_head + tl.arange(0, HALF)[None, :]
    tl.store(at, first, mask=inside)
    tl.store(at + half, second, mask=inside)


@triton.jit
def rope_write(
    q, k, v, cos, sin, k_pages, v_pages, pages, offsets,
    q_token, q_head, k_token, k_head, v_token, v_head, angle_stride,
    page_stride, page_head, page_slot, v_page_stride, v_page_head, v_page_slot,
    num_heads, num_kv_heads, half, value_width,
    HEADS: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Turns q [T, H, Dh] in place; writes turned k [T, KV, Dh] and v [T, KV, Dv] to slot offsets[t] of pages[t].

    Programs of one token: blocks of query heads first, then of key heads, then of value heads.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, HEADS)
    key_parts = tl.cdiv(num_kv_heads, HEADS)
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        start = q + token * q_token
        first, second, inside = _turned(start, cos, sin, token, q_head, angle_stride, heads, num_heads, half, 1.0, HALF)
        at = start + heads * q_head + tl.arange(0, HALF)[None, :]
        tl.store(at, first, mask=inside)
        tl.store(at + half, second, mask=inside)
    elif part < query_parts + key_parts:
        keys = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        slot = k_pages + _slot(pages, offsets, token, page_stride, page_slot)
        one, two, real = _turned(
            k + token * k_token, cos, sin, token, k_head, angle_stride, keys, num_kv_heads, half, 1.0, HALF
        )
        to = slot + keys * page_head + tl.arange(0, HALF)[None, :]
        tl.store(to, one.to(k_pages.dtype.element_ty), mask=real)
        tl.store(to + half, two.to(k_pages.dtype.element_ty), mask=real)
    else:
        kept = (part - query_parts - key_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        columns = tl.arange(0, VALUES)[None, :]
        whole = (kept < num_kv_heads) & (columns < value_width)
        values = tl.load(v + token * v_token + kept * v_head + columns, mask=whole)
        into = v_pages + _slot(pages, offsets, token, v_page_stride, v_page_slot) + kept * v_page_head + columns
        tl.store(into, values.to(v_pages.dtype.element_ty), mask=whole)


@triton.jit
def _slot(pages, offsets, token, page_stride, slot_stride):
    """Where a token's slot of the first head begins."""
    return tl.load(pages + token).to(tl.int64) * page_stride + tl.load(offsets + token).to(tl.int64) * slot_stride


@triton.jit
def _turned(start, cos, sin, angle, head_stride, angle_stride, heads, num_heads, half, sign, HALF: tl.constexpr):
    """(first halves, second halves, mask) of a token's heads after the turn, in their dtype."""
    columns = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (columns < half)
    at = start + heads * head_stride + columns
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle * angle_stride + columns, mask=columns < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle * angle_stride + columns, mask=columns < half, other=0.0).to(tl.float32) * sign
    kind = first.dtype
    first = first.to(tl.float32)
    return (first * cosine - second * sine).to(kind), (second * cosine + first * sine).to(kind), inside
