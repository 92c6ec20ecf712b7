"""A layer of SwiGLU experts for one or a few tokens: rows of weights times one token's row each, without tensor cores.

With few tokens nearly every visit has an expert of its own, and a product of a matrix with one vector is all there is. Programs load
rows of weights straight into registers, many bytes at a time and none through shared memory, and add up products in float32; sums of a
block of columns are multiplied by its scale.

Legend: as in `triton_experts`; U blocks of columns of a row, R rows of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops.early import previous_kernel_done, start_next_kernel
from hone.ops.moe.triton_experts import e2m1, gated, scale_of


@triton.jit
def numbers_of(codes, KIND: tl.constexpr, HIGH: tl.constexpr):
    """Codes or 16-bit numbers in float32. int4 and mxfp4: of the low or high halves of bytes. 2^23 + q is a number whose last bits are q."""
    if KIND == "mxfp4":
        numbers = e2m1((codes >> 4) if HIGH else (codes & 15), tl.float32)
    elif KIND == "int4":
        halves = (codes >> 4) if HIGH else (codes & 15)
        numbers = (halves.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif KIND == "int8":
        numbers = (((codes.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _load(places, own, blocks, units, MASKED: tl.constexpr):
    """Values at places [R, U, columns]; MASKED: of rows that are `own` [R] and blocks [U] that exist, 0 for others, which are not read."""
    if MASKED:
        return tl.load(places, mask=own[:, None, None] & (blocks < units)[None, :, None], other=0.0)
    return tl.load(places)


@triton.jit
def _products(rows, scales, near, far, first, scale_stride, width, own, units, KIND: tl.constexpr, BLOCK: tl.constexpr,
              SPAN: tl.constexpr, GROUPED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """float32 [R]: SPAN blocks of columns from block `first` on; rows [R, 1, 1] and scales [R, 1] are pointers. MASKED: see `_load`."""
    STORED: tl.constexpr = BLOCK // 2 if KIND == "int4" or KIND == "mxfp4" else BLOCK
    blocks = first + tl.arange(0, SPAN)
    codes = _load(
        rows + blocks[None, :, None] * STORED + tl.arange(0, STORED)[None, None, :], own, blocks, units, MASKED
    )
    products = numbers_of(codes, KIND, False) * near
    if KIND == "int4" or KIND == "mxfp4":
        products += numbers_of(codes, KIND, True) * far
    sums = tl.sum(products, 2)
    if GROUPED:
        factors = scales + (blocks * BLOCK // width)[None, :] * scale_stride
        if MASKED:
            sums *= scale_of(tl.load(factors, mask=own[:, None] & (blocks < units)[None, :], other=0.0), KIND)
        else:
            sums *= scale_of(tl.load(factors), KIND)
    return tl.sum(sums, 1)


@triton.jit
def _inputs(
    inputs, first, own, units, KIND: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """float32 [R, SPAN, columns]: the inputs of the first half of each block's columns and of the second (codes of 4 bits), or of all,
    twice.

    inputs [R, 1, 1] are pointers: every row loads its own copy, which all but the first find in the L1 cache.
    """
    STORED: tl.constexpr = BLOCK // 2 if KIND == "int4" or KIND == "mxfp4" else BLOCK
    blocks = first + tl.arange(0, SPAN)
    places = inputs + blocks[None, :, None] * BLOCK + tl.arange(0, STORED)[None, None, :]
    near = _load(places, own, blocks, units, MASKED).to(tl.float32)
    far = near
    if KIND == "int4" or KIND == "mxfp4":
        far = _load(places + STORED, own, blocks, units, MASKED).to(tl.float32)
    return near, far


@triton.jit(do_not_specialize=["top_k"])
def gate_up_visits(
    x, x_scales, weight, scales, bias, ids, out, x_stride, num_experts, top_k, inner, num_in, groups, limit, alpha,
    KIND: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, LIMITED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`triton_experts.gate_up_swiglu`, one program per visit and BLOCK_N features; D is at most STEPS x SPAN x BLOCK, less if MASKED.
    Nothing is written of nobody's visits (id E)."""
    tiles = tl.cdiv(inner, BLOCK_N)
    visit = tl.program_id(0) // tiles
    features = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.minimum(features, inner - 1)
    stored = num_in // 2 if KIND == "int4" or KIND == "mxfp4" else num_in
    width, units = num_in // groups, num_in // BLOCK
    half = inner.to(tl.int64) * stored
    inputs = x + (visit // top_k).to(tl.int64) * x_stride + 0 * mine[:, None, None]
    previous_kernel_done(EARLY)
    expert = tl.load(ids + visit).to(tl.int64)
    if expert >= num_experts:
        return
    gate_rows = weight + expert * 2 * half + mine.to(tl.int64)[:, None, None] * stored
    own_scales = scales + expert * groups * 2 * inner + mine
    own = mine >= 0
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.static_range(STEPS):
        first = step * SPAN
        near, far = _inputs(inputs, first, own, units, KIND, BLOCK, SPAN, MASKED)
        gate += _products(
            gate_rows, own_scales[:, None], near, far, first, 2 * inner, width, own, units, KIND, BLOCK, SPAN, GROUPED, MASKED
        )  # fmt: skip
        up += _products(
            gate_rows + half, own_scales[:, None] + inner, near, far, first, 2 * inner, width, own, units,
            KIND, BLOCK, SPAN, GROUPED, MASKED,
        )  # fmt: skip
    if KIND != "dense" and not GROUPED:
        gate *= scale_of(tl.load(own_scales), KIND)
        up *= scale_of(tl.load(own_scales + inner), KIND)
    if ROUNDED:
        of_token = tl.load(x_scales + visit // top_k)
        gate *= of_token
        up *= of_token
    if BIASED:
        own_bias = bias + expert * 2 * inner + mine
        gate += tl.load(own_bias).to(tl.float32)
        up += tl.load(own_bias + inner).to(tl.float32)
    start_next_kernel(EARLY)
    active = gated(gate, up, limit, alpha, LIMITED)
    tl.store(out + visit.to(tl.int64) * inner + features, active.to(out.dtype.element_ty), mask=features < inner)


@triton.jit(do_not_specialize=["top_k"])
def down_tokens(
    h, weight, scales, bias, ids, weights, out, num_experts, top_k, num_out, num_in, groups,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, SPAN: tl.constexpr,
    STEPS: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, D]: the sum of a token's visits times weights [T, k], BLOCK_N features of all of its experts in one program.
    Where visits may be nobody's (id E), of which h is not written, it is MASKED."""
    tiles = tl.cdiv(num_out, BLOCK_N)
    token = tl.program_id(0) // tiles
    rows = tl.arange(0, TOP_K * BLOCK_N)
    ranks = tl.minimum(rows // BLOCK_N, top_k - 1)
    first = (tl.program_id(0) % tiles) * BLOCK_N
    mine = tl.minimum(first + rows % BLOCK_N, num_out - 1)
    visits = token * top_k + ranks
    stored = num_in // 2 if KIND == "int4" or KIND == "mxfp4" else num_in
    width, units = num_in // groups, num_in // BLOCK
    inputs = h + visits.to(tl.int64)[:, None, None] * num_in
    previous_kernel_done(EARLY)
    experts = tl.load(ids + visits).to(tl.int64)
    own = (rows // BLOCK_N < top_k) & (experts < num_experts)
    shares = tl.load(weights + visits)
    own_rows = weight + (experts * num_out + mine)[:, None, None] * stored
    own_scales = scales + experts * groups * num_out + mine
    total = tl.zeros([TOP_K * BLOCK_N], tl.float32)
    for step in tl.static_range(STEPS):
        first_block = step * SPAN
        near, far = _inputs(inputs, first_block, own, units, KIND, BLOCK, SPAN, MASKED)
        total += _products(
            own_rows, own_scales[:, None], near, far, first_block, num_out, width, own, units, KIND, BLOCK, SPAN, GROUPED, MASKED
        )  # fmt: skip
    if KIND != "dense" and not GROUPED:
        if MASKED:
            total *= scale_of(tl.load(own_scales, mask=own, other=0.0), KIND)
        else:
            total *= scale_of(tl.load(own_scales), KIND)
    if BIASED:
        total += tl.load(bias + experts * num_out + mine, mask=own, other=0.0).to(tl.float32)
    start_next_kernel(EARLY)
    result = tl.sum(tl.reshape(tl.where(rows // BLOCK_N < top_k, total * shares, 0.0), [TOP_K, BLOCK_N]), 0)
    features = first + tl.arange(0, BLOCK_N)
    tl.store(out + token.to(tl.int64) * num_out + features, result.to(out.dtype.element_ty), mask=features < num_out)
