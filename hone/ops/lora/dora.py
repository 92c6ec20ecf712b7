"""Frozen linears with DoRA's factors: a product, its length by row, and gradients in few passes over memory.

Shapes: T tokens, K input features, N output features, r rank of a piece, R ranks of all pieces together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.activation.api import swiglu, swiglu_gradient
from hone.ops.dispatch import backend_of
from hone.ops.lora.api import Weight, _rows, _stacked


def dora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    squares: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    magnitudes: Sequence[Tensor],
    *,
    scales: Sequence[float],
    begins: Sequence[int] = (0,),
    gated: bool = False,
    backend: str | None = None,
) -> Tensor:
    """b + (m / n) (W x + s B A x): [..., K] -> [..., N], n the length of each row of W + s B A; arXiv:2402.09353.

    Piece i has the rows from begins[i] on: A is downs[i] [r, K] and B ups[i] [rows, r] in x's dtype, m is magnitudes[i] float32
    [rows]. `squares` float32 [N] are the squared lengths of the rows of W; rows of no piece are W x + b. n counts as a constant in
    the backward pass (section 4.3), which also saves the outputs before b is added: the gradient of m is made of them, so that a row
    whose m is exactly 0 gets none. With `gated` x is [..., 2K], gate and up of a SwiGLU, as in `lora_linear`. Differentiable once, in x,
    `downs`, `ups` and `magnitudes`. Raises SpecError for factors that do not fit.
    """
    columns = x.shape[-1] // 2 if gated else x.shape[-1]
    for down, up, magnitude in zip(downs, ups, magnitudes, strict=True):
        if down.shape != (up.shape[1], columns) or len(magnitude) != len(up) or {down.dtype, up.dtype} != {x.dtype}:
            raise SpecError(
                f"DoRA factors do not fit: A {tuple(down.shape)}, B {tuple(up.shape)} and m {tuple(magnitude.shape)} of {columns} "
                f"input features, x is {x.dtype}",
                fix="give for each piece A [r, K] and B [N, r] in x's dtype, and m [N]",
            )
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        rows = swiglu(x) if gated else x
        dense = weight(x.dtype)
        stretched = stretch(dense, squares, downs, ups, magnitudes, scales, begins)
        return _formula(rows, dense, bias, downs, ups, stretched, scales, begins)
    chosen = backend_of("dora_linear", x.device, backend, dtype=x.dtype)
    options = (tuple(scales), tuple(begins), gated, chosen)
    found: Tensor = _DoRA.apply(x, weight, bias, squares, options, *downs, *ups, *magnitudes)
    return found


def stretch(
    weight: Tensor,
    squares: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    magnitudes: Sequence[Tensor],
    scales: Sequence[float],
    begins: Sequence[int],
) -> Tensor:
    """m / n of every row, [N] in the dtype of `squares`, 1 outside of the pieces; differentiable in `magnitudes` alone.

    n^2 = |W|^2 + 2 s (W A^T . B) + s^2 (B (A A^T) . B), summed over r: B A is never formed.
    """
    with torch.no_grad():
        crossed = F.linear(weight, _stacked(downs).to(weight.dtype))  # W A^T [N, R]: A goes through as R tokens would
        lengths, at, dtype = [], 0, squares.dtype
        for down, up, scale, begin in zip(downs, ups, scales, begins, strict=True):
            here, wide, narrow = slice(begin, begin + len(up)), up.to(dtype), down.to(dtype)
            part = (crossed[here, at : at + len(down)].to(dtype) * wide).sum(1)
            own = ((wide @ (narrow @ narrow.T)) * wide).sum(1)
            lengths.append((squares[here] + 2 * scale * part + scale**2 * own).clamp_min(0).sqrt())
            at += len(down)
    parts, end = [], 0
    for magnitude, length, begin in zip(magnitudes, lengths, begins, strict=True):
        parts += [squares.new_ones(begin - end), magnitude.to(squares.dtype) / length]
        end = begin + len(length)
    return torch.cat([*parts, squares.new_ones(len(squares) - end)])


class _DoRA(Function):
    """Saves x, the factors and the outputs without the bias, beside which bf16 would lose them where it is large, as those of some
    models' keys are; the frozen product is made again for no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, squares: Tensor,
        options: tuple[tuple[float, ...], tuple[int, ...], bool, str], *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        scales, begins, gated, backend = options
        count = len(begins)
        downs, ups, magnitudes = factors[:count], factors[count : 2 * count], factors[2 * count :]
        rows, dense = _rows(x, gated), weight(x.dtype)
        stretched = stretch(dense, squares, downs, ups, magnitudes, scales, begins)
        out = rows @ dense.T
        narrow = (rows @ _stacked(downs).T).split([len(down) for down in downs], 1)
        for begin, up, part, scale in zip(begins, ups, narrow, scales, strict=True):
            out[:, begin : begin + len(up)].addmm_(part, up.T, alpha=scale)
        _stretched(out, stretched, backend)
        out = out.view(*x.shape[:-1], -1)
        ctx.save_for_backward(x, out, stretched, *factors)
        ctx.weight, ctx.options = weight, options
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        x, out, stretched, *factors = ctx.saved_tensors
        scales, begins, gated, backend = ctx.options
        count = len(begins)
        downs, ups, magnitudes = factors[:count], factors[count : 2 * count], factors[2 * count :]
        ranks, stacked = [len(down) for down in downs], _stacked(downs)
        flow, sums = _flow(upstream.reshape(-1, len(stretched)), out.view(-1, len(stretched)), stretched, backend)
        grad_magnitudes = [
            torch.where(one == 0, 0.0, sums[begin : begin + len(one)] / one).to(one.dtype)
            for begin, one in zip(begins, magnitudes, strict=True)
        ]
        rows = _rows(x, gated)
        narrow = (rows @ stacked.T).split(ranks, 1)
        back = flow.new_empty(len(flow), sum(ranks))
        grad_ups = []
        for begin, up, part, into, scale in zip(begins, ups, narrow, back.split(ranks, 1), scales, strict=True):
            own = flow[:, begin : begin + len(up)]
            torch.addmm(into, own, up, beta=0, alpha=scale, out=into)
            grad_ups.append(torch.addmm(up, own.T, part, beta=0, alpha=scale))
        grad_downs = (back.T @ rows).split(ranks)
        grad_x = None
        if ctx.needs_input_grad[0]:
            del rows, narrow
            grad_x = torch.mm(flow, ctx.weight(flow.dtype)).addmm_(back, stacked)
            grad_x = swiglu_gradient(x.reshape(len(flow), -1), grad_x) if gated else grad_x
            grad_x = grad_x.view(x.shape)
        return grad_x, None, None, None, None, *grad_downs, *grad_ups, *grad_magnitudes


def _formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    stretched: Tensor,
    scales: Sequence[float],
    begins: Sequence[int],
) -> Tensor:
    """For autograd and for torch.compile: the stretched product with the gradient of m."""
    added, end = list[Tensor](), 0
    for down, up, scale, begin in zip(downs, ups, scales, begins, strict=True):
        added += [x.new_zeros(*x.shape[:-1], begin - end), F.linear(F.linear(x, down), up) * scale]
        end = begin + len(up)
    whole = F.linear(x, weight) + torch.cat([*added, x.new_zeros(*x.shape[:-1], len(weight) - end)], -1)
    y = (whole * stretched).to(x.dtype)
    return y if bias is None else y + bias


def _stretched(out: Tensor, stretched: Tensor, backend: str) -> None:
    """out [T, N] becomes out * stretched, multiplied in float32."""
    if backend == "triton":
        from hone.ops.lora.triton_kernels import launch_stretch

        launch_stretch(out, stretched)
        return
    out.copy_(out * stretched)


def _flow(upstream: Tensor, out: Tensor, stretched: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(upstream * stretched [T, N], the sums over T of upstream * out, float32 [N])."""
    if backend == "triton":
        from hone.ops.lora.triton_kernels import launch_stretch_backward

        return launch_stretch_backward(upstream, out, stretched)
    return (upstream * stretched).to(upstream.dtype), (upstream.to(stretched.dtype) * out).sum(0)
