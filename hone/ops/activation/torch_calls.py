"""SwiGLU in torch calls with a hand-written backward pass: fewer passes over memory and fewer saved tensors than autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops.activation import reference


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    if torch.compiler.is_compiling():
        return reference.swiglu(gate_up)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """Saves its input only; the backward pass recomputes the gate."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return swiglu_gradient(gate_up, upstream)


def swiglu_gradient(gate_up: Tensor, upstream: Tensor) -> Tensor:
    """The gradient [..., 2F] by gate_up of `swiglu`, whose output has the gradient `upstream` [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad = torch.empty_like(gate_up)
    grad_gate, grad_up = grad.chunk(2, dim=-1)
    torch.mul(F.silu(gate), upstream, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=grad_gate)
    return grad
