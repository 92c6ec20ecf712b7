"""Norm, rotation and gate with backward passes by hand: they keep fewer tensors and read them fewer times than autograd.

Each agrees with its namesake in `ops.reference`, the oracle. Where no gradient is wanted they skip autograd's bookkeeping,
which is most of their time when one token is decoded. Under torch.compile they are the reference, which it fuses itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops import reference


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


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]. arXiv:2104.09864."""
    if torch.compiler.is_compiling():
        return reference.rope(x, cos, sin)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rope.apply(x, cos, sin)
    return _turned(x, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    if torch.compiler.is_compiling():
        return reference.swiglu(gate_up)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row."""

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


class _Rope(torch.autograd.Function):
    """Its gradient is the rotation back, so only the angles are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rope.apply(upstream, cos, -sin), None, None


class _SwiGLU(torch.autograd.Function):
    """Keeps its input only; the gate is computed again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate), upstream, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=grad_gate)
        return grad


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * scale, scale) with scale = 1 / sqrt(mean(x^2) + eps), in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
