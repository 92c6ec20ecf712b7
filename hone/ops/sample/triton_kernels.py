"""Draws tokens from logits: thresholds of top-k, top-p and min-p without a sort, then Gumbel-max over parts of a row.

Noise is a hash of (row key, token), as `hone.ops.sample.noise` defines it: 64-bit integers, then a double's two logarithms.
Thresholds are found by bisection over the order of float32's bit patterns, two bits per pass over the row.
"""

import triton
import triton.language as tl


@triton.jit
def floors(
    logits,  # [E, V], last axis contiguous
    temperature,  # float32 [E]
    top_k,  # int32 [E]; V or more: off
    top_p,  # float32 [E]; 1 or more: off
    min_p_log,  # float32 [E]: log(min_p), -inf: off
    floor,  # float32 [E]: smaller scaled logits are dropped
    stride,
    num_values,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """floor[e] = the least logit / temperature among the tokens that row e may draw."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    temp = tl.load(temperature + place)
    count = tl.load(top_k + place)
    share = tl.load(top_p + place)
    cut = tl.load(min_p_log + place)
    if temp == 0.0:  # takes the most likely token: no threshold
        tl.store(floor + place, float("-inf"))
        return
    peak = tl.full([], float("-inf"), tl.float32)
    if (cut > float("-inf")) | (share < 1.0):
        for begin in range(0, num_values, BLOCK):
            peak = tl.maximum(peak, tl.max(_scaled(row, begin, num_values, temp, BLOCK), 0))
    least = peak + cut
    if count < num_values:
        # At most count - 1 values lie above the floor. A value that min-p drops never raises it.
        kth = _least_with(row, num_values, temp, float("-inf"), peak, count.to(tl.float32), False, BLOCK, STAGES)
        if share < 1.0:
            whole = _mass(row, num_values, temp, kth, least, peak, count, BLOCK)
            some = _some(share * whole)
            kept = _least_with(row, num_values, temp, tl.maximum(kth, least), peak, some, True, BLOCK, STAGES)
            least = tl.maximum(least, kept)
        least = tl.maximum(least, kth)
    elif share < 1.0:
        whole = _mass(row, num_values, temp, float("-inf"), least, peak, num_values, BLOCK)
        kept = _least_with(row, num_values, temp, least, peak, _some(share * whole), True, BLOCK, STAGES)
        least = tl.maximum(least, kept)
    tl.store(floor + place, least)


@triton.jit
def draw_parts(
    logits,  # [E, V]
    temperature,  # float32 [E]
    floor,  # float32 [E], when FILTERED
    keys,  # int64 [E]
    best,  # float64 [E, parts]
    token,  # int32 [E, parts]
    stride,
    num_values,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one block of a row, and its score: logit / temperature + noise, or the logit at temperature 0."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + place * stride + at, mask=at < num_values, other=float("-inf")).to(tl.float32)
    temp = tl.load(temperature + place)
    if temp == 0.0:
        scores = values.to(tl.float64)
    else:
        values = tl.div_rn(values, temp)
        if FILTERED:
            values = tl.where(values < tl.load(floor + place), float("-inf"), values)
        scores = values.to(tl.float64) + _gumbel(tl.load(keys + place), at)
    # NaN must neither exclude the other tokens nor be drawn; the caller checks the logits for it.
    scores = tl.where((scores == scores) & (at < num_values), scores, float("-inf"))
    highest, where = tl.max(scores, 0, return_indices=True)
    parts = tl.num_programs(1)
    tl.store(best + place * parts + part, highest)
    tl.store(token + place * parts + part, part * BLOCK + where)


@triton.jit
def best_of_parts(best, token, out, parts, BLOCK: tl.constexpr):
    """out [E] int64: the token of the best part, the first of equal ones."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    scores = tl.load(best + place * parts + at, mask=at < parts, other=float("-inf"))
    _, where = tl.max(scores, 0, return_indices=True)
    tl.store(out + place, tl.load(token + place * parts + where).to(tl.int64))


@triton.jit
def _scaled(row, begin, num_values, temp, BLOCK: tl.constexpr):
    at = begin + tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < num_values, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, temp)


@triton.jit
def _ordered(values):
    """int32 with the order of the float32."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _above(
    row, num_values, temp, floor, peak, first, second, third,
    MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Count, or with MASS the sum of exp(value - peak), of values from `floor` on whose order exceeds each of three pivots."""
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, num_values, BLOCK, num_stages=STAGES):
        values = _scaled(row, begin, num_values, temp, BLOCK)
        order = _ordered(values)
        inside = (values >= floor) & (values > float("-inf"))
        weight = tl.where(inside, tl.exp(values - peak) if MASS else 1.0, 0.0)
        a += tl.where(order > first, weight, 0.0)
        b += tl.where(order > second, weight, 0.0)
        c += tl.where(order > third, weight, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _least_with(
    row, num_values, temp, floor, peak, bound, MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The least value t such that the count, or the mass, of the values above t is less than `bound`.

    The values above t change only at the row's values, so t is one of them (or -inf, if all are kept).
    """
    low = tl.full([], -2147483648, tl.int64)
    for turn in range(16):
        # t is in [low, low + 4 * step): three pivots tell in which quarter.
        step = (tl.full([], 1, tl.int64) << 30) >> (2 * turn)
        first, second, third = low + step - 1, low + 2 * step - 1, low + 3 * step - 1
        a, b, c = _above(
            row, num_values, temp, floor, peak, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32),
            MASS, BLOCK, STAGES,
        )  # fmt: skip
        quarters = (a >= bound).to(tl.int64) + (b >= bound).to(tl.int64) + (c >= bound).to(tl.int64)
        low += quarters * step
    order = low.to(tl.int32)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(value == value, value, float("-inf"))  # bit patterns below that of -inf are NaN


@triton.jit
def _some(mass):
    """`mass`, but above 0: the largest value is kept even if top-p is 0."""
    return tl.maximum(mass, 1e-30)


@triton.jit
def _mass(row, num_values, temp, kth, least, peak, count, BLOCK: tl.constexpr):
    """Mass of the `count` best values that are not below `least`; of those equal to the last, as many as the count allows."""
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_values, BLOCK):
        values = _scaled(row, begin, num_values, temp, BLOCK)
        inside = (values > kth) & (values >= least)
        total += tl.where(inside, tl.exp(values - peak), 0.0)
        larger += (values > kth).to(tl.int32)
    rest = tl.where((kth >= least) & (kth > float("-inf")), (count - tl.sum(larger, 0)) * tl.exp(kth - peak), 0.0)
    return tl.sum(total, 0) + rest


@triton.jit
def _mixed(value):
    """SplitMix64 of uint64 numbers."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _gumbel(key, tokens):
    """Standard Gumbel noise, float64, of each token under a row's key."""
    x = _mixed(tokens.to(tl.uint64)) ^ key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD  # MurmurHash3's 64-bit finalizer
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    x = x ^ (x >> 33)
    uniform = ((x >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(-tl.log(uniform))
