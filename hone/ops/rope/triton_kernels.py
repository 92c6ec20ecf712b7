"""Rotary position embedding, with optional writes to the pages of a key/value cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel


@triton.jit
def rope_rows(
    x, out, cos, sin, x_token, x_head, out_token, out_head, angle_stride, angle_rows, num_heads, half, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out = x [T, heads, 2 * half] rotated by the angles cos, sin [angle_rows, half] of row t % angle_rows.

    `sign` -1 is the inverse rotation. `out` may be `x`: a program reads all its values before it writes.
    """
    parts = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    heads = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    angle = token % angle_rows
    first, second, inside = _rotate(
        x + token * x_token, cos, sin, angle, x_head, angle_stride, heads, num_heads, half, sign, x, 0.0, HALF, False
    )
    at = out + token * out_token + heads * out_head + tl.arange(0, HALF)[None, :]
    tl.store(at, first, mask=inside)
    tl.store(at + half, second, mask=inside)


@triton.jit
def rope_write(
    q, k, v, cos, sin, k_pages, v_pages, pages, offsets, k_scale, v_scale, q_norm, k_norm,
    q_token, q_head, k_token, k_head, v_token, v_head, angle_stride,
    page_stride, page_head, page_slot, v_page_stride, v_page_head, v_page_slot,
    scale_page, scale_head, scale_slot, v_scale_page, v_scale_head, v_scale_slot,
    num_heads, num_kv_heads, half, value_width, largest, eps,
    SCALED: tl.constexpr, FIXED: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    VALUES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotates q [T, H, Dh] in place; writes rotated k [T, KV, Dh] and v [T, KV, Dv] to slot offsets[t] of pages[t].

    When NORMED, heads are normed first, with weights q_norm, k_norm [Dh].

    When SCALED, pages hold 8-bit codes and each token and head gets its scale, as in `hone.ops.quantize_kv`; when FIXED too,
    scales of heads (and pages, by their strides) are read instead.
    Programs of one token: blocks of query heads first, then of key heads, then of value heads.
    """
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    query_parts = tl.cdiv(num_heads, HEADS)
    key_parts = tl.cdiv(num_kv_heads, HEADS)
    token = (tl.program_id(0) // (query_parts + 2 * key_parts)).to(tl.int64)
    part = tl.program_id(0) % (query_parts + 2 * key_parts)
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        start = q + token * q_token
        first, second, inside = _rotate(
            start, cos, sin, token, q_head, angle_stride, heads, num_heads, half, 1.0, q_norm, eps, HALF, NORMED
        )
        at = start + heads * q_head + tl.arange(0, HALF)[None, :]
        tl.store(at, first, mask=inside)
        tl.store(at + half, second, mask=inside)
    else:
        page = tl.load(pages + token).to(tl.int64)
        slot = tl.load(offsets + token).to(tl.int64)
        if part < query_parts + key_parts:
            keys = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
            start = k + token * k_token
            one, two, real = _rotate(
                start, cos, sin, token, k_head, angle_stride, keys, num_kv_heads, half, 1.0, k_norm, eps, HALF, NORMED
            )
            if SCALED:
                known = keys < num_kv_heads
                scale_at = k_scale + page * scale_page + slot * scale_slot + keys * scale_head
                if FIXED:
                    scale = tl.load(scale_at, mask=known, other=1.0)
                else:
                    peak = tl.maximum(tl.max(tl.abs(one.to(tl.float32)), 1), tl.max(tl.abs(two.to(tl.float32)), 1))
                    scale = _scale_of(peak[:, None], largest)
                    tl.store(scale_at, scale, mask=known)
                one = _codes(one, scale, largest, k_pages.dtype.element_ty)
                two = _codes(two, scale, largest, k_pages.dtype.element_ty)
            to = k_pages + page * page_stride + slot * page_slot + keys * page_head + tl.arange(0, HALF)[None, :]
            tl.store(to, one.to(k_pages.dtype.element_ty), mask=real)
            tl.store(to + half, two.to(k_pages.dtype.element_ty), mask=real)
        else:
            kept = (part - query_parts - key_parts) * HEADS + tl.arange(0, HEADS)[:, None]
            columns = tl.arange(0, VALUES)[None, :]
            whole = (kept < num_kv_heads) & (columns < value_width)
            values = tl.load(v + token * v_token + kept * v_head + columns, mask=whole, other=0.0)
            if SCALED:
                into = v_scale + page * v_scale_page + slot * v_scale_slot + kept * v_scale_head
                if FIXED:
                    own = tl.load(into, mask=kept < num_kv_heads, other=1.0)
                else:
                    own = _scale_of(tl.max(tl.abs(values.to(tl.float32)), 1)[:, None], largest)
                    tl.store(into, own, mask=kept < num_kv_heads)
                values = _codes(values, own, largest, v_pages.dtype.element_ty)
            into_page = v_pages + page * v_page_stride + slot * v_page_slot + kept * v_page_head + columns
            tl.store(into_page, values.to(v_pages.dtype.element_ty), mask=whole)


@triton.jit
def _scale_of(peak, largest):
    """The scale that maps `peak` to the largest code; never 0."""
    return tl.maximum(tl.div_rn(peak, largest + tl.zeros_like(peak)), 1.1754943508222875e-38)


@triton.jit
def _codes(values, scale, largest, dtype: tl.constexpr):
    codes = tl.div_rn(values.to(tl.float32), scale + tl.zeros(values.shape, tl.float32))
    if dtype == tl.int8:
        codes = tl.minimum(tl.maximum(codes, -largest - 1), largest)
        # Round half to even, as torch does: adding and subtracting 1.5 * 2^23 leaves an integer.
        codes = (codes + 12582912.0) - 12582912.0
    else:
        codes = tl.minimum(tl.maximum(codes, -largest), largest)
    return codes.to(dtype)


@triton.jit
def _rotate(
    start, cos, sin, angle, head_stride, angle_stride, heads, num_heads, half, sign, norm, eps,
    HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """(first halves, second halves, mask) of a token's heads after the norm, when NORMED, and the rotation, in their dtype."""
    columns = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (columns < half)
    at = start + heads * head_stride + columns
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle * angle_stride + columns, mask=columns < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle * angle_stride + columns, mask=columns < half, other=0.0).to(tl.float32) * sign
    kind = first.dtype
    first = first.to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        by = tl.load(norm + columns, mask=columns < half, other=0.0).to(tl.float32)
        later = tl.load(norm + half + columns, mask=columns < half, other=0.0).to(tl.float32)
        # Rounded twice, as a norm of its own would be (`hone.ops.norm`).
        first = ((first * scale).to(kind).to(tl.float32) * by).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * later).to(kind).to(tl.float32)
    return (first * cosine - second * sine).to(kind), (second * cosine + first * sine).to(kind), inside


def rope_shape(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(HEADS, HALF, warps) of the rotary kernels: at most 512 pairs per program, 8 per thread."""
    block = triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, 512 // block))
    return heads, block, max(1, min(2, heads * block // 256))


def launch_rope(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """out [T, heads, Dh] = x rotated by cos, sin [rows, Dh/2]."""
    num_tokens, num_heads, head_dim = x.shape
    heads, block, warps = rope_shape(num_heads, head_dim)
    if num_tokens:
        rope_rows[(num_tokens * triton.cdiv(num_heads, heads),)](
            x, out, cos, sin, *x.stride()[:2], *out.stride()[:2], cos.stride(0), len(cos), num_heads, head_dim // 2,
            sign, HEADS=heads, HALF=block, num_warps=warps,
        )  # fmt: skip


def launch_rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Tensor,
    offsets: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, largest: float,
    norms: tuple[Tensor, Tensor] | None, eps: float,
) -> None:  # fmt: skip
    """Rotates q in place, writes rotated k and v to their slots, as codes where there are scales; cos, sin [T, Dh/2].

    `norms`: weights of the norms of query and key heads.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, value_width = v.shape[1:]
    heads, block, warps = rope_shape(num_heads, head_dim)
    scales, fixed = (q, q), False
    if k_scale is not None and v_scale is not None:
        fixed = k_scale.dim() < 3
        scales = (k_scale, v_scale)
    if num_tokens:
        rope_write[(num_tokens * (triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)),)](
            q, k, v, cos, sin, k_pages, v_pages, pages, offsets, *scales, *(norms or (cos, cos)),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), *k_pages.stride()[:3],
            *v_pages.stride()[:3], *_scale_strides(scales[0]), *_scale_strides(scales[1]), num_heads, num_kv_heads,
            head_dim // 2, value_width, largest, eps, SCALED=k_scale is not None, FIXED=fixed,
            NORMED=norms is not None, HEADS=heads, HALF=block, VALUES=triton.next_power_of_2(value_width),
            num_warps=warps, **launch_options(early_launch(q.device)),
        )  # fmt: skip


def _scale_strides(scale: Tensor) -> tuple[int, ...]:
    """Strides over pages, heads and slots of scales [KV], [num_pages, KV] or [num_pages, KV, page_size]."""
    strides = scale.stride()
    return (0, *strides, 0) if scale.dim() == 1 else (*strides, 0)[:3]
