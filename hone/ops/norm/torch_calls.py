"""Root-mean-square norm in torch calls with a hand-written backward pass: fewer passes and saved tensors than autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. arXiv:1910.07467."""
    if torch.compiler.is_compiling():
        return reference.rms_norm(x, weight, eps)
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel, float32 inside
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    normed, _ = _normed(x, eps)
    return normed.to(x.dtype).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """Saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed.to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # float32 or wider, as scale is
        product = upstream * normed
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight.to(product.dtype)) / -x.shape[-1]
            grad_x = torch.addcmul(upstream * weight, normed, mean[..., None]).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * scale, scale) with scale = 1 / sqrt(mean(x^2) + eps), in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale
