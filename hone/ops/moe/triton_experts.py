"""A layer of SwiGLU experts for tokens that chose them: gate and up with the gate of their products, then down, then the weighted sum.

A program multiplies some rows of one expert's weights with the tokens that chose it, and reads their rows of x where they are: nothing
is sorted into place. Weights are dense, or codes of 4 or 8 bits that are widened in registers; a block of columns that share a scale
is one sum, which the scale multiplies. Weights are the rows of the tensor cores' products, tokens their columns.

Legend: T tokens, k experts a token, P = T k visits (visit p is of token p // k), E experts, D width, F inner width of an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops.early import previous_kernel_done, start_next_kernel


@triton.jit
def e2m1(codes, dtype: tl.constexpr):
    """4-bit floats as numbers of dtype: sign, exponent and fraction are moved to where dtype has them; 0 and 0.5 are subnormal."""
    if dtype == tl.float32:
        wide = codes.to(tl.int32)
        bits = ((wide & 7) << 22) + (126 << 23)
        bits = tl.where((wide & 7) == 1, 0x3F000000, bits)
        bits = tl.where((wide & 7) == 0, 0, bits) | ((wide & 8) << 28)
    elif dtype == tl.bfloat16:
        wide = codes.to(tl.int16)
        bits = ((wide & 7) << 6) + (126 << 7)
        bits = tl.where((wide & 7) == 1, 0x3F00, bits)
        bits = (tl.where((wide & 7) == 0, 0, bits) | ((wide & 8) << 12)).to(tl.int16)
    else:
        wide = codes.to(tl.int16)
        bits = ((wide & 7) << 9) + (14 << 10)
        bits = tl.where((wide & 7) == 1, 0x3800, bits)
        bits = (tl.where((wide & 7) == 0, 0, bits) | ((wide & 8) << 12)).to(tl.int16)
    return bits.to(dtype, bitcast=True)


@triton.jit
def scale_of(stored, KIND: tl.constexpr):
    """Stored scales in float32: mxfp4's are exponents + 127, of which 0 counts as 0."""
    if KIND == "mxfp4":
        return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def gated(gate, up, limit, alpha, LIMITED: tl.constexpr):
    """silu(gate) * up, or LIMITED gpt-oss's clamped gate, in float32."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate * (1.0 / (1.0 + tl.exp(-alpha * gate))) * up
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit
def _widened(codes, KIND: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Codes as exact numbers of dtype, 16 or 32 bits. int4 and mxfp4: of the low or high halves of bytes."""
    if KIND == "mxfp4":
        numbers = e2m1((codes >> 4) if HIGH else (codes & 15), dtype)
    elif KIND == "int4":
        halves = (codes >> 4) if HIGH else (codes & 15)
        if dtype == tl.bfloat16:  # 128 + q and 1024 + q are numbers whose last bits are q
            numbers = (halves.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        elif dtype == tl.float16:
            numbers = (halves.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        else:
            numbers = halves.to(dtype) - 8.0
    elif KIND == "int8" and dtype != tl.float32:  # the same in float32, faster than a conversion of integers
        wide = (((codes.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        numbers = wide.to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def _add_block(
    total, rows, scales, inputs, begin, num_in, real,
    KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """total [N, TOKENS] + the product of BLOCK columns from `begin`, times the scales of their group where GROUPED.

    rows, scales [N, 1] and inputs [1, TOKENS] are pointers to the first column, the group's scales, and the tokens' inputs.
    ONCE: nothing else reads the weights.
    """
    if KIND == "int4" or KIND == "mxfp4":
        HALF: tl.constexpr = BLOCK // 2
        at = tl.arange(0, HALF)
        low = tl.load(inputs + (begin + at)[:, None], mask=real, other=0.0)
        high = tl.load(inputs + (begin + HALF + at)[:, None], mask=real, other=0.0)
        pairs = tl.load(rows + (begin // 2 + at)[None, :])
        piece = tl.dot(_widened(pairs, KIND, False, low.dtype), low)
        piece = tl.dot(_widened(pairs, KIND, True, low.dtype), high, piece)
    else:
        k = begin + tl.arange(0, BLOCK)
        if EVEN:
            given = tl.load(inputs + k[:, None], mask=real, other=0.0)
            if ONCE:
                own = tl.load(rows + k[None, :], eviction_policy="evict_first")
            else:
                own = tl.load(rows + k[None, :])
        else:
            given = tl.load(inputs + k[:, None], mask=real & (k < num_in)[:, None], other=0.0)
            own = tl.load(rows + k[None, :], mask=(k < num_in)[None, :], other=0.0)
        if not GROUPED:
            return tl.dot(_widened(own, KIND, False, given.dtype), given, total)
        piece = tl.dot(_widened(own, KIND, False, given.dtype), given)
    if GROUPED:
        piece *= scale_of(tl.load(scales), KIND)
    return total + piece


@triton.jit
def _visits(
    ids, order, ends, slot, first, num_visits, num_experts,
    LISTED: tl.constexpr, BY_VISIT: tl.constexpr, IDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """(expert, how many visits it has, the visits int32 [TOKENS] from its `first` one on) of a slot of the grid.

    LISTED: slot e is expert e, whose visits are order[ends[e - 1]: ends[e]]. Otherwise ids [P] are searched; BY_VISIT: slot p is
    the expert of visit p, and has none if an earlier visit has the same expert, or it is nobody's (id E).
    """
    if LISTED:
        end = tl.load(ends + slot)
        begin = tl.load(ends + slot - 1, mask=slot > 0, other=0)
        at = begin + first + tl.arange(0, TOKENS)
        count = end - begin
        visits = tl.load(order + at, mask=at < end, other=0)
        expert = slot
    else:
        at = tl.arange(0, IDS)
        chosen = tl.load(ids + at, mask=at < num_visits, other=-1).to(tl.int32)
        expert = slot
        if BY_VISIT:
            expert = tl.load(ids + slot).to(tl.int32)
        here = (chosen == expert).to(tl.int32)
        count = tl.sum(here, 0)
        if BY_VISIT:
            first_of = tl.min(tl.where(here > 0, at, IDS), 0) == slot
            count = tl.where(first_of & (expert < num_experts), count, 0)
        rank = tl.cumsum(here, 0) - 1
        wanted = first + tl.arange(0, TOKENS)
        match = (here[None, :] > 0) & (rank[None, :] == wanted[:, None])
        visits = tl.sum(tl.where(match, at[None, :], 0), 1)
    return expert, count, visits


@triton.jit(do_not_specialize=["num_visits", "top_k"])
def gate_up_swiglu(
    x, x_scales, weight, scales, bias, ids, order, ends, out, x_stride, num_visits, num_experts, top_k, inner, num_in, groups, limit, alpha,
    KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, BIASED: tl.constexpr, LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr, LISTED: tl.constexpr, BY_VISIT: tl.constexpr, IDS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [P, F] = silu(gate) * up of each visit, gate and up the halves of weight [E, 2 F, D] (int4: D / 2 bytes) times x [T, D].

    One program per slot (`_visits`) and BLOCK_N of the F features; scales [E, G, 2 F], bias [E, 2 F]. ROUNDED: x are codes, and
    x_scales float32 [T] multiply their sums.
    """
    tiles = tl.cdiv(inner, BLOCK_N)
    slot = tl.program_id(0) // tiles
    features = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.minimum(features, inner - 1)
    stored = num_in // 2 if KIND == "int4" or KIND == "mxfp4" else num_in
    width = num_in // groups
    previous_kernel_done(EARLY)
    expert, count, visits = _visits(ids, order, ends, slot, 0, num_visits, num_experts, LISTED, BY_VISIT, IDS, TOKENS)
    half = inner.to(tl.int64) * stored
    gate_rows = weight + expert.to(tl.int64) * 2 * half + mine.to(tl.int64)[:, None] * stored
    up_rows = gate_rows + half
    own_scales = scales + expert.to(tl.int64) * groups * 2 * inner + mine[:, None]
    for first in range(0, count, TOKENS):
        if first > 0:
            expert, count, visits = _visits(
                ids, order, ends, slot, first, num_visits, num_experts, LISTED, BY_VISIT, IDS, TOKENS
            )
        real = (first + tl.arange(0, TOKENS) < count)[None, :]
        inputs = x + (visits // top_k).to(tl.int64)[None, :] * x_stride
        gate = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        up = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        for begin in tl.range(0, num_in, BLOCK, num_stages=STAGES):
            here = own_scales + (begin // width) * 2 * inner
            gate = _add_block(
                gate, gate_rows, here, inputs, begin, num_in, real, KIND, BLOCK, EVEN, GROUPED, TOKENS <= 16
            )
            up = _add_block(
                up, up_rows, here + inner, inputs, begin, num_in, real, KIND, BLOCK, EVEN, GROUPED, TOKENS <= 16
            )
        if KIND != "dense" and not GROUPED:
            gate *= scale_of(tl.load(own_scales), KIND)
            up *= scale_of(tl.load(own_scales + inner), KIND)
        if ROUNDED:
            of_tokens = tl.load(x_scales + visits // top_k)[None, :]
            gate *= of_tokens
            up *= of_tokens
        if BIASED:
            own_bias = bias + expert.to(tl.int64) * 2 * inner + mine[:, None]
            gate += tl.load(own_bias).to(tl.float32)
            up += tl.load(own_bias + inner).to(tl.float32)
        active = gated(gate, up, limit, alpha, LIMITED)
        places = out + visits.to(tl.int64)[None, :] * inner + features[:, None]
        tl.store(places, active.to(out.dtype.element_ty), mask=real & (features < inner)[:, None])
    start_next_kernel(EARLY)


@triton.jit(do_not_specialize=["num_visits"])
def down_visits(
    h, weight, scales, bias, ids, order, ends, out, num_visits, num_experts, num_out, num_in, groups,
    KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, BIASED: tl.constexpr,
    LISTED: tl.constexpr, BY_VISIT: tl.constexpr, IDS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [P, D] = h [P, F] times weight [E, D, F] of each visit's expert; scales [E, G, D], bias [E, D]."""
    tiles = tl.cdiv(num_out, BLOCK_N)
    slot = tl.program_id(0) // tiles
    features = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.minimum(features, num_out - 1)
    stored = num_in // 2 if KIND == "int4" or KIND == "mxfp4" else num_in
    width = num_in // groups
    previous_kernel_done(EARLY)
    expert, count, visits = _visits(ids, order, ends, slot, 0, num_visits, num_experts, LISTED, BY_VISIT, IDS, TOKENS)
    rows = weight + expert.to(tl.int64) * num_out * stored + mine.to(tl.int64)[:, None] * stored
    own_scales = scales + expert.to(tl.int64) * groups * num_out + mine[:, None]
    for first in range(0, count, TOKENS):
        if first > 0:
            expert, count, visits = _visits(
                ids, order, ends, slot, first, num_visits, num_experts, LISTED, BY_VISIT, IDS, TOKENS
            )
        real = (first + tl.arange(0, TOKENS) < count)[None, :]
        inputs = h + visits.to(tl.int64)[None, :] * num_in
        total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        for begin in tl.range(0, num_in, BLOCK, num_stages=STAGES):
            here = own_scales + (begin // width) * num_out
            total = _add_block(total, rows, here, inputs, begin, num_in, real, KIND, BLOCK, EVEN, GROUPED, TOKENS <= 16)
        if KIND != "dense" and not GROUPED:
            total *= scale_of(tl.load(own_scales), KIND)
        if BIASED:
            total += tl.load(bias + expert.to(tl.int64) * num_out + mine[:, None]).to(tl.float32)
        places = out + visits.to(tl.int64)[None, :] * num_out + features[:, None]
        tl.store(places, total.to(out.dtype.element_ty), mask=real & (features < num_out)[:, None])
    start_next_kernel(EARLY)


@triton.jit
def sum_visits(
    y, ids, weights, out, width, top_k, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, D]: the sum over j of weights[t, j] y[t k + j], in float32 in the order of j. SOME: without nobody's visits (id E)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        if j < top_k:
            given = inside
            if SOME:
                given = inside & (tl.load(ids + token * top_k + j) < num_experts)
            values = tl.load(y + (token * top_k + j) * width + columns, mask=given, other=0.0).to(tl.float32)
            total += values * tl.load(weights + token * top_k + j)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
