"""Draws tokens from logits: thresholds of top-k, top-p and min-p without a sort, then Gumbel-max over parts of a row.

Noise is a hash of (row key, token), as `hone.ops.sample.noise` defines it. Thresholds are found by bisection over the order
of float32's bit patterns, two bits per pass over the row; one program finds a row's, so that none waits for another.

Legend: E rows, V values of a row, S programs of a row.
"""

import triton
import triton.language as tl

from hone.ops import compat

ON_GPU = tl.constexpr(not compat.INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def floors(
    logits,  # [E, V], last axis contiguous
    temperature,  # float32 [E]
    top_k,  # int32 [E]; 0, V or more: off
    top_p,  # float32 [E]; 1 or more: off
    min_p,  # float32 [E]; 0: off
    floor,  # float32 [E]: smaller scaled logits are dropped
    stride,
    num_values,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """floor[e] = the least logit / temperature among the tokens that row e may draw."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    temp = tl.load(temperature + place)
    count = num_values
    share = tl.full([], 1.0, tl.float32)
    cut = tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        count = tl.load(top_k + place).to(tl.int32)
        count = tl.where(count == 0, num_values, count)
    if TOP_P:
        share = tl.load(top_p + place)
    if MIN_P:
        cut = tl.log(tl.load(min_p + place))
    if temp == 0.0:  # takes the most likely token: no threshold
        tl.store(floor + place, float("-inf"))
        return
    factor = _factor(temp)
    peak = tl.full([], float("-inf"), tl.float32)
    if (cut > float("-inf")) | (share < 1.0):
        for begin in range(0, num_values, BLOCK):
            peak = tl.maximum(peak, tl.max(_scaled(row, begin, num_values, factor, BLOCK), 0))
    least = peak + cut
    if count < num_values:
        # At most count - 1 values lie above the floor. A value that min-p drops never raises it.
        kth = _least_with(row, num_values, factor, float("-inf"), peak, count.to(tl.float32), False, BLOCK, STAGES)
        if share < 1.0:
            whole = _mass(row, num_values, factor, kth, least, peak, count, BLOCK)
            some = _some(share * whole)
            kept = _least_with(row, num_values, factor, tl.maximum(kth, least), peak, some, True, BLOCK, STAGES)
            least = tl.maximum(least, kept)
        least = tl.maximum(least, kth)
    elif share < 1.0:
        whole = _mass(row, num_values, factor, float("-inf"), least, peak, num_values, BLOCK)
        kept = _least_with(row, num_values, factor, least, peak, _some(share * whole), True, BLOCK, STAGES)
        least = tl.maximum(least, kept)
    tl.store(floor + place, least)


@triton.jit
def draw(
    logits,  # [E, V], last axis contiguous
    temperature,  # float32 [E]
    floors,  # float32 [E], when FILTERED: values / temperature below are dropped
    keys,  # int64 [E], or the seeds, when SEEDED
    positions,  # int64 [E], when SEEDED
    best,  # float32 [E, S, SEVERAL]: the highest scores of each part
    token,  # int32 [E, S, SEVERAL]: their tokens
    peak,  # float32 [E, S]: the largest logit of each part, NaN if one is
    stride,
    num_values,
    span,  # values of a program, a multiple of BLOCK
    FILTERED: tl.constexpr, SEEDED: tl.constexpr, S: tl.constexpr, SEVERAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best tokens of one part of a row: highest logit / temperature + noise of those kept, or logit at temperature 0."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = logits + place * stride
    first = part * span
    last = tl.minimum(first + span, num_values)
    temp = tl.load(temperature + place)
    factor = _factor(temp)
    floor = tl.full([], float("-inf"), tl.float32)
    if FILTERED:
        floor = tl.load(floors + place)
    if SEEDED:
        key = _mixed(_mixed(_mixed(tl.load(keys + place).to(tl.uint64, bitcast=True))
                            ^ tl.load(positions + place).to(tl.uint64, bitcast=True)))  # fmt: skip
    else:
        key = tl.load(keys + place).to(tl.uint64, bitcast=True)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = first + tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in range(first, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < num_values, other=float("-inf")).to(tl.float32)
        broken = tl.where(values == values, broken, 1)
        peaks = tl.where(values > peaks, values, peaks)
        if temp == 0.0:
            scores = values
        else:
            scaled = values * factor
            if FILTERED:
                scaled = tl.where(scaled < floor, float("-inf"), scaled)
            scores = scaled + _gumbel(low, high, at)
        # NaN compares as False: it is never drawn. Of equal scores the first stays.
        higher = scores > tops
        tops = tl.where(higher, scores, tops)
        tokens = tl.where(higher, at, tokens)
    to = place * S + part
    for turn in tl.static_range(SEVERAL):
        # Of scores that are all -inf the first token stays, which is a real one.
        top = tl.max(tops, 0)
        chosen = tl.min(tl.where(tops == top, tokens, 2147483647), 0)
        tl.store(best + to * SEVERAL + turn, top)
        tl.store(token + to * SEVERAL + turn, chosen)
        tops = tl.where(tokens == chosen, float("-inf"), tops)
    tl.store(peak + to, tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(peaks, 0)))


@triton.jit
def best_of_parts(best, token, peak, out, out_peak, S: tl.constexpr, SEVERAL: tl.constexpr, BLOCK: tl.constexpr):
    """out [E, SEVERAL] int64: the best tokens of all parts, of equal ones the first; out_peak [E] float32: the largest logit, or NaN."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    first = place * S * SEVERAL
    scores = tl.load(best + first + at, mask=at < S * SEVERAL, other=float("-inf"))
    tokens = tl.load(token + first + at, mask=at < S * SEVERAL, other=2147483647)
    peaks = tl.load(peak + place * S + at, mask=at < S, other=float("-inf"))
    for turn in tl.static_range(SEVERAL):
        top = tl.max(scores, 0)
        chosen = tl.min(tl.where(scores == top, tokens, 2147483647), 0)
        tl.store(out + place * SEVERAL + turn, chosen.to(tl.int64))
        scores = tl.where(tokens == chosen, float("-inf"), scores)
    broken = tl.max((peaks != peaks).to(tl.int32), 0)
    highest = tl.max(tl.where(peaks == peaks, peaks, float("-inf")), 0)
    tl.store(out_peak + place, tl.where(broken > 0, float("nan"), highest))


@triton.jit
def _factor(temp):
    """1 / temperature, finite; 1 at temperature 0."""
    factor = tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(temp == 0.0, 1.0, temp))
    return tl.minimum(factor, 3.4028234663852886e38)


@triton.jit
def _scaled(row, begin, num_values, factor, BLOCK: tl.constexpr):
    """Values times `factor`; NaN, and what is past the end, as -inf."""
    at = begin + tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < num_values, other=float("-inf")).to(tl.float32) * factor
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _ordered(values):
    """int32 with the order of the float32."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _above(
    row, num_values, factor, floor, peak, first, second, third,
    MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Count, or with MASS the sum of exp(value - peak), of values from `floor` on whose order exceeds each of three pivots."""
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, num_values, BLOCK, num_stages=STAGES):
        values = _scaled(row, begin, num_values, factor, BLOCK)
        order = _ordered(values)
        inside = (values >= floor) & (values > float("-inf"))
        weight = tl.where(inside, tl.exp(values - peak) if MASS else 1.0, 0.0)
        a += tl.where(order > first, weight, 0.0)
        b += tl.where(order > second, weight, 0.0)
        c += tl.where(order > third, weight, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _least_with(
    row, num_values, factor, floor, peak, bound, MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
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
            row, num_values, factor, floor, peak, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32),
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
def _mass(row, num_values, factor, kth, least, peak, count, BLOCK: tl.constexpr):
    """Mass of the `count` best values that are not below `least`; of those equal to the last, as many as the count allows."""
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_values, BLOCK):
        values = _scaled(row, begin, num_values, factor, BLOCK)
        inside = (values > kth) & (values >= least)
        total += tl.where(inside, tl.exp(values - peak), 0.0)
        larger += (values > kth).to(tl.int32)
    rest = tl.where((kth >= least) & (kth > float("-inf")), (count - tl.sum(larger, 0)) * tl.exp(kth - peak), 0.0)
    return tl.sum(total, 0) + rest


@triton.jit
def _mixed(value):
    """SplitMix64 of a uint64 number."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _log2(x):
    """log2 of a normal number above 0, as the hardware has it: within 2^-22 of it near 1."""
    if ON_GPU:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _gumbel(low, high, tokens):
    """Standard Gumbel noise, float32, of each token under a row's key (its low and high half)."""
    x = (tokens.to(tl.uint32) * 0x9E3779B1) ^ low
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ high) * 0x846CA68B
    x = x ^ (x >> 16)
    v = tl.minimum(x.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    # -log(1 - v): a series where 1 - v would lose v's last digits.
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    waiting = tl.where(v < 0.0625, series, _log2(1.0 - v) * -0.6931471805599453)
    return _log2(waiting) * -0.6931471805599453
