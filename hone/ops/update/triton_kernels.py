"""One pass over a weight, its gradient and its moments for an AdamW step; one over a gradient to widen it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.update.reference import AdamWNumbers

BLOCK, WARPS = 1024, 4
"""Elements and warps of a program: 8 elements a thread, 16 bytes of half precision and twice as many of float32."""


@triton.jit
def adamw_step(
    weight,  # float32 [N]
    grad,  # [N]
    exp_avg,  # float32 [N]
    exp_avg_sq,  # float32 [N]
    rounded,  # [N], when ROUND
    factor,  # float32 [1], when SCALE
    size,  # N
    keep,  # 1 - lr * weight_decay
    rate,  # lr / (1 - beta1^count)
    fresh1,  # 1 - beta1
    beta2,
    fresh2,  # 1 - beta2
    root,  # sqrt(1 - beta2^count)
    eps,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    EVEN: tl.constexpr,  # N is a multiple of BLOCK
    BLOCK: tl.constexpr,
):
    """See hone.ops.update.reference.adamw_step."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) | EVEN
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        g = g * tl.load(factor)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    m = m + (g - m) * fresh1
    v = v * beta2 + g * g * fresh2
    w = w * keep - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(weight + at, w, mask=inside)
    if ROUND:
        tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def widen(
    into,  # float32 [N]
    source,  # [N]
    other,  # [N], when PAIR
    size,  # N
    ADD: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,  # N is a multiple of BLOCK
    BLOCK: tl.constexpr,
):
    """into = source, or into += source; with PAIR of source + other."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) | EVEN
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(into + at, mask=inside, other=0.0)
    if PAIR:
        x += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + at, x, mask=inside)


def launch_adamw(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWNumbers,
    factor: Tensor | None,
    rounded: Tensor | None,
) -> None:
    """See hone.ops.update.api.adamw_step."""
    count, lr, beta1, beta2, eps, weight_decay = numbers
    size = weight.numel()
    adamw_step[(triton.cdiv(size, BLOCK),)](
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        weight if rounded is None else rounded,
        weight if factor is None else factor,
        size,
        1 - lr * weight_decay,
        lr / (1 - beta1**count),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**count) ** 0.5,
        eps,
        SCALE=factor is not None,
        ROUND=rounded is not None,
        EVEN=size % BLOCK == 0,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def launch_widen(into: Tensor, source: Tensor, other: Tensor | None, add: bool) -> None:
    """See hone.ops.update.api.widen."""
    size, pair = into.numel(), other is not None
    second = source if other is None else other
    widen[(triton.cdiv(size, BLOCK),)](
        into, source, second, size, ADD=add, PAIR=pair, EVEN=size % BLOCK == 0, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
