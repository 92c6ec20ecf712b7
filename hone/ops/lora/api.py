"""Linears whose weights are frozen, alone and with LoRA factors, with backward passes that keep little and multiply little.

A frozen weight has no gradient, so its product saves nothing: backward asks for the weight again, which codes then
dequantize a second time. With factors the inputs alone are saved, once for all pieces (q, k and v; gate and up).
Shapes: T tokens, K input features, N output features, r rank of a piece, R ranks of all pieces together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.activation.api import swiglu, swiglu_gradient
from hone.ops.lora import reference

Weight = Callable[[torch.dtype], Tensor]
"""Gives the frozen weight [N, K] in a dtype, for a product in which it is then forgotten."""


def frozen_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., K] -> [..., N], differentiable once in x alone; nothing is saved. Raises SpecError for a weight that does not fit."""
    if torch.compiler.is_compiling():
        return F.linear(x, _fitting(weight, x), bias)
    found: Tensor = _Frozen.apply(x, weight, bias)
    return found


def lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    *,
    scale: float,
    begins: Sequence[int] = (0,),
    gated: bool = False,
) -> Tensor:
    """x W^T + b + scale (x A^T) B^T: [..., K] -> [..., N], differentiable once in x, `downs` and `ups`; arXiv:2106.09685.

    Piece i adds to the outputs from begins[i] on: A is downs[i] [r, K], B is ups[i] [rows of the piece, r]. W and b are
    frozen. With `gated` x is [..., 2K], gate and up of a SwiGLU, whose activation is computed again in the backward
    pass. Everything has x's dtype. Raises SpecError for factors that do not fit.
    """
    columns = x.shape[-1] // 2 if gated else x.shape[-1]
    wrong = [
        f"A {tuple(down.shape)} and B {tuple(up.shape)} of {columns} input features"
        for down, up in zip(downs, ups, strict=True)
        if down.shape != (up.shape[1], columns) or {down.dtype, up.dtype} != {x.dtype}
    ]
    if wrong or len(begins) != len(downs) or not downs:
        raise SpecError(
            f"LoRA factors do not fit: {wrong[0] if wrong else f'{len(downs)} pieces begin at {list(begins)}'}, x is {x.dtype}",
            fix="give for each piece A [r, K], B [N, r] in x's dtype, and its first output feature",
        )
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        inputs = swiglu(x) if gated else x
        return reference.lora_linear(inputs, weight(x.dtype), bias, downs, ups, begins, scale)
    found: Tensor = _LoRA.apply(x, weight, bias, scale, tuple(begins), gated, *downs, *ups)
    return found


class _Frozen(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.columns = weight, x.shape[-1]
        return F.linear(x, _fitting(weight, x), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        return upstream @ ctx.weight(upstream.dtype), None, None


class _LoRA(Function):
    """Saves x and the factors, computes x A^T again, and adds every part of a gradient into one tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, scale: float, begins: tuple[int, ...], gated: bool,
        *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        rows = _rows(x, gated)
        out = F.linear(rows, weight(x.dtype), bias)
        downs, ups = factors[: len(begins)], factors[len(begins) :]
        narrow = (rows @ _stacked(downs).T).split([len(down) for down in downs], 1)
        for begin, up, part in zip(begins, ups, narrow, strict=True):
            out[:, begin : begin + len(up)].addmm_(part, up.T, alpha=scale)
        ctx.save_for_backward(x, *factors)
        ctx.weight, ctx.scale, ctx.begins, ctx.gated = weight, scale, begins, gated
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        x, *factors = ctx.saved_tensors
        downs, ups = factors[: len(ctx.begins)], factors[len(ctx.begins) :]
        ranks, stacked = [len(down) for down in downs], _stacked(downs)
        flow, rows = upstream.reshape(-1, upstream.shape[-1]), _rows(x, ctx.gated)
        narrow = (rows @ stacked.T).split(ranks, 1)
        back = flow.new_empty(len(flow), sum(ranks))  # scale g B of all pieces
        grad_ups = []
        for begin, up, part, into in zip(ctx.begins, ups, narrow, back.split(ranks, 1), strict=True):
            own = flow[:, begin : begin + len(up)]
            torch.addmm(into, own, up, beta=0, alpha=ctx.scale, out=into)
            grad_ups.append(torch.addmm(up, own.T, part, beta=0, alpha=ctx.scale))
        grad_downs = (back.T @ rows).split(ranks)
        grad_x = None
        if ctx.needs_input_grad[0]:
            del rows, narrow
            grad_x = torch.mm(flow, ctx.weight(flow.dtype)).addmm_(back, stacked)
            grad_x = swiglu_gradient(x.reshape(len(flow), -1), grad_x) if ctx.gated else grad_x
            grad_x = grad_x.view(x.shape)
        return grad_x, None, None, None, None, None, *grad_downs, *grad_ups


def _fitting(weight: Weight, x: Tensor) -> Tensor:
    """The weight in x's dtype."""
    found = weight(x.dtype)
    if found.dim() != 2 or found.shape[1] != x.shape[-1]:
        raise SpecError(
            f"the frozen weight is {tuple(found.shape)}, and x has {x.shape[-1]} input features",
            fix="give what returns the weight [N, K] of x [..., K]",
        )
    return found


def _rows(x: Tensor, gated: bool) -> Tensor:
    """The inputs of the linear, [T, K]."""
    rows = x.reshape(-1, x.shape[-1])
    return swiglu(rows) if gated else rows


def _stacked(factors: Sequence[Tensor]) -> Tensor:
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))
