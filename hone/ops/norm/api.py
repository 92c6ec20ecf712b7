"""Root-mean-square norm in one pass over memory: the public function, its GPU op and gradient.

Legend: D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.entry import entry_of
from hone.ops.formats import LARGEST
from hone.ops.norm import reference, torch_calls

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

Codes = Literal["fp8", "int8"]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quantize: Codes | None = None,
    *,
    offset: float = 0.0,
    backend: str | None = None,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., D]; arXiv:1910.07467.

    With `offset` it is multiplied by weight + offset, in float32 before it is rounded to x's dtype; arXiv:2408.00118.

    With `residual` (x's shape and dtype) x + residual is normed and returned too: (y, x + residual).
    With `quantize` y is returned as codes, float8_e4m3fn or int8, and one float32 scale per row [..., 1] (the row's largest
    magnitude over 448 or 127): (codes, scales) or (codes, scales, x + residual); codes have no gradient.
    y has x's dtype, sums are float32 inside; differentiable once. Raises SpecError naming the argument that does not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise SpecError(
            f"weight has {weight.numel()} values in {list(weight.shape)}, x rows have {x.shape[-1]}",
            fix=f"give weight [{x.shape[-1]}]",
        )
    case = {"dtype": x.dtype, "weight_dtype": weight.dtype, "width": x.shape[-1]}
    if offset:
        case["offset"] = True
    chosen = backend_of("rms_norm", x.device, backend, **case)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise SpecError(
            f"residual {tuple(residual.shape)} {residual.dtype} is not like x {tuple(x.shape)} {x.dtype}",
            fix="give residual x's shape and dtype: expand it, or cast it with .to(x.dtype)",
        )
    if quantize not in (None, "fp8", "int8"):
        raise SpecError(f"quantize is {quantize!r}; it may be None, 'fp8' or 'int8'", fix="leave it out for x's dtype")
    if chosen == "triton":
        if offset:
            raise SpecError(f"the kernel of rms_norm has no offset, and it is {offset}", fix="leave backend out")
        return _rms_norm_triton(x, weight, eps, residual, quantize)
    summed = x if residual is None else x + residual
    if offset:
        normed = reference.rms_norm(summed, weight, eps, offset)
    else:
        normed = (torch_calls if chosen == "torch" else reference).rms_norm(summed, weight, eps)
    if quantize is None:
        return normed if residual is None else (normed, summed)
    codes, scales = row_codes(normed.detach(), quantize)
    return (codes, scales) if residual is None else (codes, scales, summed)


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: Codes | None) -> Any:
    if quantize:
        x, weight, residual = x.detach(), weight.detach(), None if residual is None else residual.detach()
    run = entry_of(_norm_op, partial(_normed, False), _Norm, x, weight, residual)
    y, summed, rows = run(x, weight, eps, residual, quantize or "")
    made = (y, rows, summed) if quantize else (y, summed)
    return made if residual is not None else made[:-1] if quantize else y


def row_codes(x: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales [..., 1]) of x [..., D], one scale per row: the reference of `rms_norm`'s quantized output."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = LARGEST[_CODES[kind]]
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    steps = (wide / scales).clamp(-largest, largest)
    codes = steps.to(torch.float8_e4m3fn) if kind == "fp8" else steps.round().to(torch.int8)
    return codes, scales.float()


# The GPU path: the Triton kernels as torch ops and, for eager calls, as plain autograd Functions.


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, codes: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual or empty, float32 1 / rms of each row or, with `codes`, its scale [..., 1])."""
    return _normed(True, x, weight, eps, residual, codes)


def _normed(
    keeps: bool, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, codes: str
) -> tuple[Tensor, Tensor, Tensor]:
    from hone.ops.norm.triton_kernels import launch_forward

    y, summed, rows = _norm_fake(x, weight, eps, residual, codes)
    rows = rows if keeps or codes else rows.new_empty(0)  # only a backward pass needs 1 / rms
    launch_forward(x, residual, weight, y, summed, rows, eps, LARGEST[_CODES[codes]] if codes else 0.0)
    return y, summed, rows


_norm_op = torch.library.custom_op("hone::rms_norm", _norm, mutates_args=())


@_norm_op.register_fake
def _norm_fake(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, codes: str
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=_CODES.get(codes, x.dtype), device=x.device)
    summed = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    rows = (*x.shape[:-1], 1) if codes else x.shape[:-1]
    return y, summed, torch.empty(rows, dtype=torch.float32, device=x.device)


def _norm_backward(
    upstream: Tensor, upstream_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """(gradient by x, gradient by weight or empty)."""
    from hone.ops.norm.triton_kernels import launch_backward

    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_weight = launch_backward(upstream, upstream_sum, x, weight, rstd, grad_x, wants_weight)
    return grad_x, weight.new_empty(0) if grad_weight is None else grad_weight.to(weight.dtype)


_norm_backward_op = torch.library.custom_op("hone::rms_norm_backward", _norm_backward, mutates_args=())


@_norm_backward_op.register_fake
def _norm_backward_fake(
    upstream: Tensor, upstream_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, torch.empty_like(weight) if wants_weight else weight.new_empty(0)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, residual, codes = inputs
    _, summed, rstd = output
    assert not codes, "codes have no gradient"
    ctx.has_residual = residual is not None
    ctx.save_for_backward(summed if ctx.has_residual else x, weight, rstd)
    ctx.set_materialize_grads(False)


def _norm_grad(
    run: Callable[..., Any], ctx: Any, upstream: Tensor | None, upstream_sum: Tensor | None, _: Any
) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    flow_sum = upstream_sum if ctx.has_residual else None
    if upstream is None:
        return flow_sum, None, None, flow_sum, None
    grad_x, grad_weight = run(upstream, flow_sum, x, weight, rstd, ctx.needs_input_grad[1])
    return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, grad_x if ctx.has_residual else None, None


_norm_op.register_autograd(partial(_norm_grad, _norm_backward_op), setup_context=_norm_setup)


class _Norm(Function):
    """`hone::rms_norm` without the cost of torch's dispatcher."""

    forward, setup_context = staticmethod(_norm), staticmethod(_norm_setup)
    backward = staticmethod(once_differentiable(partial(_norm_grad, _norm_backward)))
