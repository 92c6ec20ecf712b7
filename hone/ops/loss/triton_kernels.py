"""Softmax cross entropy of a chunk of logits: the loss of each row, and its gradient in place of the logits.

One program per row. The first pass over the row is an online log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867);
the second overwrites the logits with their gradients, from the row's end, which the L2 cache still holds.
"""

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def cross_entropy_rows(
    logits,  # [R, V], overwritten by the gradients
    teacher,  # [R, V], the teacher's logits, when TEACHER
    targets,  # int64 [R]
    losses,  # float32 [R]
    factor,  # float32 [1]: gradients and losses are multiplied by it
    logits_stride,
    teacher_stride,
    num_values,
    ignore_index,
    lift,
    z_loss,
    smoothing,
    alpha,
    temperature,
    TEACHER: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """losses[r] = factor * loss of row r; logits[r] = factor * lift * its gradient when GRAD. Ignored rows are zeroed."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * logits_stride
    teacher_row = teacher + place * teacher_stride
    target = tl.load(targets + place)
    if target == ignore_index:
        tl.store(losses + place, 0.0)
        if GRAD:
            _zero(row, num_values, BLOCK)
        return
    chosen = tl.load(row + target).to(tl.float32)
    scale = tl.load(factor)
    if TEACHER:
        loss, log_sum, soft_log_sum, teacher_log_sum = _divergence(
            row, teacher_row, chosen, num_values, z_loss, alpha, temperature, BLOCK
        )
    else:
        log_sum, mean = _log_sum_exp(row, num_values, SMOOTH, BLOCK, STAGES)
        loss = log_sum - chosen + smoothing * (chosen - mean) + z_loss * log_sum * log_sum
        soft_log_sum = log_sum
        teacher_log_sum = log_sum
    tl.store(losses + place, loss * scale)
    if GRAD:
        scale *= lift
        text = 1.0 - alpha if TEACHER else 1.0
        rise = text * (1.0 + 2.0 * z_loss * log_sum) * scale
        floor = text * smoothing / num_values * scale
        drop = text * (1.0 - smoothing) * scale
        pull = alpha * temperature * scale
        _grads(
            row, teacher_row, target, num_values, log_sum, soft_log_sum, teacher_log_sum,
            rise, floor, drop, pull, 1.0 / temperature, TEACHER, BLOCK, STAGES,
        )  # fmt: skip


@triton.jit
def log_sum_rows(
    logits,  # [R, V]
    places,  # int64 [R], the target's column; outside [0, V) it is another device's
    sums,  # float32 [2, R]
    logits_stride,
    num_rows,
    num_values,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """sums[0, r] = log(sum(exp(row r))), sums[1, r] = its logit at places[r], or 0."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    place = tl.load(places + number)
    log_sum, _ = _log_sum_exp(row, num_values, False, BLOCK, STAGES)
    chosen = tl.load(row + place, mask=(place >= 0) & (place < num_values), other=0.0).to(tl.float32)
    tl.store(sums + number, log_sum)
    tl.store(sums + num_rows + number, chosen)


@triton.jit
def gradient_rows(
    logits,  # [R, V], overwritten by the gradients
    places,  # as in log_sum_rows
    log_sums,  # float32 [R], of all devices' columns
    valid,  # bool [R]; rows without get zeros
    logits_stride,
    num_values,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """logits[r] = softmax of row r over all devices' columns, less one at places[r]."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    if tl.load(valid + number) == 0:
        _zero(row, num_values, BLOCK)
        return
    log_sum = tl.load(log_sums + number)
    place = tl.load(places + number)
    _grads(
        row, row, place, num_values, log_sum, log_sum, log_sum, 1.0, 0.0, 1.0, 0.0, 1.0, False, BLOCK, STAGES
    )  # fmt: skip


@triton.jit
def _zero(row, num_values, BLOCK: tl.constexpr):
    for begin in range(0, num_values, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(row + at, tl.zeros([BLOCK], row.dtype.element_ty), mask=at < num_values)


@triton.jit
def _log_sum_exp(row, num_values, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(log(sum(exp(row))), mean of the row or 0)."""
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, num_values, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < num_values, other=float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        highest = tl.maximum(peak, tl.max(values, 0))
        total = total * tl.exp2((peak - highest) * _LOG2E) + tl.exp2((values - highest) * _LOG2E)
        if SMOOTH:
            plain += tl.where(at < num_values, values, 0.0)
        peak = highest
    return peak + tl.log2(tl.sum(total, 0)) * _LN2, tl.sum(plain, 0) / num_values


@triton.jit
def _divergence(row, teacher_row, chosen, num_values, z_loss, alpha, temperature, BLOCK: tl.constexpr):
    """alpha t^2 KL(teacher / t || student / t) + (1 - alpha) cross entropy, and the three log-sums that gradients need."""
    soften = 1.0 / temperature
    peak = tl.full([], float("-inf"), tl.float32)
    teacher_peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    soft = tl.zeros([BLOCK], tl.float32)
    teacher_sum = tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)  # sum of exp(teacher / t) * (teacher - student) / t
    for begin in range(0, num_values, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < num_values
        values = tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32)
        teacher_values = tl.load(teacher_row + at, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(peak, tl.max(values, 0))
        teacher_highest = tl.maximum(teacher_peak, tl.max(teacher_values, 0))
        total = total * tl.exp2((peak - highest) * _LOG2E) + tl.exp2((values - highest) * _LOG2E)
        soft = soft * tl.exp2((peak - highest) * soften * _LOG2E) + tl.exp2((values - highest) * soften * _LOG2E)
        shrink = tl.exp2((teacher_peak - teacher_highest) * soften * _LOG2E)
        share = tl.exp2((teacher_values - teacher_highest) * soften * _LOG2E)
        teacher_sum = teacher_sum * shrink + share
        gap = gap * shrink + tl.where(inside, share * (teacher_values - values) * soften, 0.0)
        peak = highest
        teacher_peak = teacher_highest
    log_sum = peak + tl.log2(tl.sum(total, 0)) * _LN2
    soft_log_sum = peak * soften + tl.log2(tl.sum(soft, 0)) * _LN2
    teacher_total = tl.sum(teacher_sum, 0)
    teacher_log_sum = teacher_peak * soften + tl.log2(teacher_total) * _LN2
    divergence = tl.sum(gap, 0) / teacher_total - teacher_log_sum + soft_log_sum
    loss = alpha * temperature * temperature * divergence
    loss += (1.0 - alpha) * (log_sum - chosen + z_loss * log_sum * log_sum)
    return loss, log_sum, soft_log_sum, teacher_log_sum


@triton.jit
def _grads(
    row, teacher_row, target, num_values, log_sum, soft_log_sum, teacher_log_sum,
    rise, floor, drop, pull, soften, TEACHER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """row = rise * softmax(row) - floor - drop at the target (+ pull * (softened softmax - the teacher's))."""
    last = (num_values - 1) // BLOCK * BLOCK
    for back in tl.range(0, num_values, BLOCK, num_stages=STAGES):
        at = last - back + tl.arange(0, BLOCK)
        inside = at < num_values
        values = tl.load(row + at, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        grad = rise * tl.exp2((values - log_sum) * _LOG2E) - floor
        if TEACHER:
            teacher_values = tl.load(teacher_row + at, mask=inside, other=float("-inf")).to(tl.float32)
            own = tl.exp2((values * soften - soft_log_sum) * _LOG2E)
            grad += pull * (own - tl.exp2((teacher_values * soften - teacher_log_sum) * _LOG2E))
        grad = tl.where(at == target, grad - drop, grad)
        tl.store(row + at, grad.to(row.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def scale_in_place(values, factor, count, BLOCK: tl.constexpr):
    """values *= factor[0]; returns at once where the factor is 1, so that the usual case costs no memory traffic."""
    by = tl.load(factor).to(tl.float32)
    if by == 1.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scaled = tl.load(values + at, mask=inside).to(tl.float32) * by
    tl.store(values + at, scaled.to(values.dtype.element_ty), mask=inside)
