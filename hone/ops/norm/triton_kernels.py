"""Root-mean-square norm over rows: forward (with residual, with quantized output) and backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel


@triton.jit
def rms_norm_forward(
    x,  # [T, inner, D], any strides of the first two axes
    residual,  # the same, when RESIDUAL
    weight,  # [D]
    y,  # [T, D], in the codes' dtype when QUANTIZED
    summed,  # [T, D]: x + residual, when RESIDUAL
    rstd,  # float32 [T], when KEEPS
    scales,  # float32 [T]: y's true value is code * scale, when QUANTIZED
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    inner,
    num_rows,
    eps,
    largest,
    RESIDUAL: tl.constexpr,
    KEEPS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = x / rms(x) * weight of ROWS rows, where x is x + residual (rounded to x's dtype) when RESIDUAL."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = _inside(rows, columns, num_rows, WIDTH, ROWS, BLOCK)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    values = tl.load(x + _start(rows, inner, x_outer, x_inner) + columns, mask=inside, other=0.0)
    by = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)  # loaded during the sum
    if RESIDUAL:
        before = residual + _start(rows, inner, residual_outer, residual_inner) + columns
        before = tl.load(before, mask=inside, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(x.dtype.element_ty)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    if KEEPS:
        tl.store(rstd + rows, scale, mask=rows < num_rows)
    # The reference rounds the normed row to x's dtype before it multiplies by the weight.
    normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32) * by
    if QUANTIZED:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
        step = tl.maximum(tl.max(tl.abs(normed), 1)[:, None], 1e-12) / largest
        tl.store(scales + rows, step, mask=rows < num_rows)
        normed = tl.div_rn(normed, step + tl.zeros_like(normed))
        if y.dtype.element_ty == tl.int8:
            # Round half to even, as torch does: adding and subtracting 1.5 * 2^23 leaves an integer.
            normed = (normed + 12582912.0) - 12582912.0
        normed = tl.minimum(tl.maximum(normed, -largest), largest)
    tl.store(y + rows * WIDTH + columns, normed.to(y.dtype.element_ty), mask=inside)
    if RESIDUAL:
        tl.store(summed + rows * WIDTH + columns, values, mask=inside)


@triton.jit
def _inside(rows, columns, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a tile's valid values; without comparisons where a program has one whole row."""
    whole: tl.constexpr = ROWS == 1 and BLOCK == WIDTH
    return tl.full([ROWS, BLOCK], True, tl.int1) if whole else (rows < num_rows) & (columns < WIDTH)


@triton.jit
def _start(rows, inner, outer_stride, inner_stride):
    """Offset of a flat row: heads of a fused projection are runs of `inner` rows."""
    return rows // inner * outer_stride + rows % inner * inner_stride


@triton.jit
def rms_norm_backward(
    upstream,  # [T, inner, D], any strides of the first two axes
    upstream_sum,  # contiguous: the gradient of the summed residual, when RESIDUAL
    x,  # [T, inner, D]: the norm's input
    weight,  # [D]
    rstd,  # float32 [T]
    grad_x,  # [T, D]
    partial,  # float32 [programs, D]: each program's part of the weight's gradient, when WEIGHT
    upstream_outer,
    upstream_inner,
    x_outer,
    x_inner,
    inner,
    num_rows,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient by x of every num_programs-th tile of rows; the weight's gradient is summed in registers."""
    columns = tl.arange(0, BLOCK)[None, :]
    by = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (step * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = _inside(rows, columns, num_rows, WIDTH, ROWS, BLOCK)
        flow = upstream + _start(rows, inner, upstream_outer, upstream_inner) + columns
        flow = tl.load(flow, mask=inside, other=0.0).to(tl.float32)
        values = x + _start(rows, inner, x_outer, x_inner) + columns
        values = tl.load(values, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < num_rows, other=0.0)
        normed = values * scale
        product = flow * normed
        if WEIGHT:
            grad_weight += product
        mean = tl.sum(product * by, 1)[:, None] / WIDTH
        grad = (flow * by - normed * mean) * scale
        if RESIDUAL:
            grad += tl.load(upstream_sum + rows * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + rows * WIDTH + columns, grad.to(grad_x.dtype.element_ty), mask=inside)
    if WEIGHT:
        where = partial + tl.program_id(0).to(tl.int64) * WIDTH + columns
        tl.store(where, tl.sum(grad_weight, 0)[None, :], mask=columns < WIDTH)


def tile(width: int) -> tuple[int, int, int]:
    """(ROWS, BLOCK, warps) for rows of `width` values: at least 1024 values per program, 16 or 32 per thread."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return rows, block, max(2, min(16, rows * block // 512))


def backward_plan(device: torch.device, width: int, value_bytes: int) -> tuple[int, int]:
    """(programs, stages) of the backward pass: programs fill the GPU once and prefetch their tiles.

    Each program sums its part of the weight's gradient, so few programs leave few parts to add. Rows too wide for
    prefetching in shared memory get more programs instead.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    rows, block, _ = tile(width)
    stages = min(3, SHARED_BYTES // (3 * value_bytes * rows * block))
    return (num_sms * max(1, 4096 // (rows * block)), stages) if stages > 1 else (num_sms * 4, 1)


SHARED_BYTES = 200 << 10
"""Most bytes of shared memory for a program's prefetched tiles in the backward pass."""


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor,
    summed: Tensor,
    rows: Tensor,
    eps: float,
    largest: float,
) -> None:
    """Fills y and summed, and `rows`, unless empty, with 1 / rms of each row or, where `largest` is not 0, the codes' scales."""
    source, before = _alike(x, x if residual is None else residual)
    weight = weight.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    if not num_rows:
        return
    per, block, warps = tile(width)
    rms_norm_forward[(triton.cdiv(num_rows, per),)](
        source, before, weight, y, summed, rows, rows, *source.stride()[:2], *before.stride()[:2], source.shape[1],
        num_rows, eps, largest, RESIDUAL=residual is not None, KEEPS=largest == 0 and rows.numel() > 0,
        QUANTIZED=largest != 0, WIDTH=width, ROWS=per, BLOCK=block, num_warps=warps,
        **launch_options(early_launch(x.device)),
    )  # fmt: skip


def launch_backward(
    upstream: Tensor, upstream_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, wants: bool
) -> Tensor | None:
    """Fills grad_x; returns the weight's gradient in float32 when `wants`."""
    source, flow = _alike(x, upstream)
    weight = weight.contiguous()
    num_rows, width = rstd.numel(), x.shape[-1]
    per, block, warps = tile(width)
    programs, stages = backward_plan(x.device, width, x.element_size())
    programs = min(triton.cdiv(num_rows, per), programs)
    partial = torch.empty(programs if wants else 0, width, dtype=torch.float32, device=x.device)
    if num_rows:
        rms_norm_backward[(programs,)](
            flow, flow if upstream_sum is None else upstream_sum.contiguous(), source, weight, rstd, grad_x, partial,
            *flow.stride()[:2], *source.stride()[:2], source.shape[1], num_rows, RESIDUAL=upstream_sum is not None,
            WEIGHT=wants, WIDTH=width, ROWS=per, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return partial.sum(0) if wants else None


def _alike(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [outer, inner, D] of one shape, without a copy where their strides allow it."""
    one, two = _runs(x), _runs(other)
    if one.shape != two.shape:
        one, two = (given.contiguous().view(-1, 1, given.shape[-1]) for given in (x, other))
    return one, two


def _runs(x: Tensor) -> Tensor:
    """x [..., D] as [outer, inner, D]: heads of a fused projection are runs of `inner` rows."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    try:
        return x.view(-1, 1, x.shape[-1])
    except RuntimeError:
        pass
    try:
        return x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return x.contiguous().view(-1, 1, x.shape[-1])
