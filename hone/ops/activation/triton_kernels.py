"""The SwiGLU gates and their gradients, which recompute the gate."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel


@triton.jit
def _part(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(row, columns, mask of the columns) of a program; neighbouring blocks of a row run together, so reads are contiguous.

    A width known at compile time makes the division cheap: these programs take a few microseconds.
    """
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = tl.full([BLOCK], True, tl.int1) if WIDTH % BLOCK == 0 else at < WIDTH
    return row, at, inside


@triton.jit
def swiglu_forward(gate_up, out, gate_up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """out [T, F] = silu(gate) * up of gate_up [T, 2F], BLOCK columns of a row a program; WIDTH is F."""
    row, at, inside = _part(WIDTH, BLOCK)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + at, mask=inside, other=0.0)
    # The reference rounds silu(gate) before it multiplies.
    active = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (active * up.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gate_up, upstream, grad, gate_up_stride, upstream_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """grad [T, 2F] from upstream [T, F] and the forward's input."""
    row, at, inside = _part(WIDTH, BLOCK)
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    flow = tl.load(upstream + row * upstream_stride + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    active = gate * share
    grad_gate = flow * up * (share + active * (1.0 - share))
    start = grad + row * 2 * WIDTH
    tl.store(start + at, grad_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(start + WIDTH + at, (flow * active).to(grad.dtype.element_ty), mask=inside)


@triton.jit
def clamped_forward(
    gate_up, out, gate_up_stride, limit, alpha, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """out [T, F] = (up + 1) * gate * sigmoid(alpha gate) of gate_up [T, 2F], gate at most `limit`, up within it."""
    row, at, inside = _part(WIDTH, BLOCK)
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    tl.store(
        out + row * WIDTH + at,
        ((up + 1.0) * gate * tl.sigmoid(alpha * gate)).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def clamped_backward(
    gate_up, upstream, grad, gate_up_stride, upstream_stride, limit, alpha, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """grad [T, 2F] from upstream [T, F] and the forward's input; nothing flows through a number that was clamped."""
    row, at, inside = _part(WIDTH, BLOCK)
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    flow = tl.load(upstream + row * upstream_stride + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.minimum(gate, limit)
    share = tl.sigmoid(alpha * low)
    active = low * share
    shift = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
    grad_gate = tl.where(gate <= limit, flow * shift * (share + alpha * active * (1.0 - share)), 0.0)
    grad_up = tl.where(tl.abs(up) <= limit, flow * active, 0.0)
    start = grad + row * 2 * WIDTH
    tl.store(start + at, grad_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(start + WIDTH + at, grad_up.to(grad.dtype.element_ty), mask=inside)


def gate_shape(width: int) -> tuple[int, int]:
    """(columns a program, warps) of the gate's kernels: 8 columns a thread, and no masks where 512 divides the width."""
    block = next((size for size in (1024, 512) if width % size == 0), min(1024, triton.next_power_of_2(width)))
    return block, max(1, block // 256)


def launch_gate(gate_up: Tensor, out: Tensor) -> None:
    """out [..., F] from gate_up [..., 2F]."""
    _forward(swiglu_forward, gate_up, out)


def launch_gate_backward(gate_up: Tensor, upstream: Tensor, grad: Tensor) -> None:
    """grad [..., 2F] from the forward's input and upstream [..., F]."""
    _backward(swiglu_backward, gate_up, upstream, grad)


def launch_clamped(gate_up: Tensor, out: Tensor, limit: float, alpha: float) -> None:
    """As `launch_gate`, of the clamped gate."""
    _forward(clamped_forward, gate_up, out, limit, alpha)


def launch_clamped_backward(gate_up: Tensor, upstream: Tensor, grad: Tensor, limit: float, alpha: float) -> None:
    """As `launch_gate_backward`, of the clamped gate."""
    _backward(clamped_backward, gate_up, upstream, grad, limit, alpha)


def _forward(kernel: Any, gate_up: Tensor, out: Tensor, *numbers: float) -> None:
    rows, width = _rows(gate_up), out.shape[-1]
    block, warps = gate_shape(width)
    if out.numel():
        grid = (triton.cdiv(width, block) * len(rows),)
        early = launch_options(early_launch(gate_up.device))
        kernel[grid](rows, out, rows.stride(0), *numbers, WIDTH=width, BLOCK=block, num_warps=warps, **early)


def _backward(kernel: Any, gate_up: Tensor, upstream: Tensor, grad: Tensor, *numbers: float) -> None:
    rows, flow, width = _rows(gate_up), _rows(upstream), upstream.shape[-1]
    block, warps = gate_shape(width)
    if grad.numel():
        grid = (triton.cdiv(width, block) * len(rows),)
        strides = rows.stride(0), flow.stride(0)
        kernel[grid](rows, flow, grad, *strides, *numbers, WIDTH=width, BLOCK=block, num_warps=warps)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
