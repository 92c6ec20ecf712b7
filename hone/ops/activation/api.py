"""The gates of feed-forwards in one pass over memory: public functions, their GPU ops and gradients.

Legend: F width of a feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.activation import reference, torch_calls
from hone.ops.dispatch import backend_of
from hone.ops.entry import entry_of


def swiglu(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202.

    Only its input is saved for the backward pass, which recomputes the gate. Differentiable once. Raises SpecError for
    a last axis of odd size.
    """
    if gate_up.shape[-1] % 2:
        _refuse_odd(gate_up)
    chosen = backend_of("swiglu", gate_up.device, backend, dtype=gate_up.dtype)
    if chosen == "triton":
        return entry_of(_gate_op, _gate, _Gate, gate_up)(gate_up)
    return (torch_calls if chosen == "torch" else reference).swiglu(gate_up)


def swiglu_gradient(gate_up: Tensor, upstream: Tensor, *, backend: str | None = None) -> Tensor:
    """The gradient [..., 2F] by `gate_up` [..., 2F] of `swiglu`, whose output has the gradient `upstream` [..., F].

    For a backward pass that computes the gate again, as that of `lora_linear`; it has no gradient of its own.
    """
    chosen = backend_of("swiglu", gate_up.device, backend, dtype=gate_up.dtype)
    return _gate_backward(gate_up, upstream) if chosen == "triton" else torch_calls.swiglu_gradient(gate_up, upstream)


def geglu(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """gelu(gate) * up of the halves of the last axis, gelu by its tanh approximation: [..., 2F] -> [..., F]. arXiv:2002.05202.

    Two calls of torch on every device; under torch.compile they become one kernel. Raises SpecError for an axis that has
    no halves.
    """
    if gate_up.shape[-1] % 2:
        _refuse_odd(gate_up)
    backend_of("geglu", gate_up.device, backend)
    return reference.geglu(gate_up)


def clamped_swiglu(gate_up: Tensor, limit: float = 7.0, alpha: float = 1.702, *, backend: str | None = None) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha gate) of the halves of the last axis: [..., 2F] -> [..., F], as gpt-oss has it.

    The gate is at most `limit`, up is from -limit to limit. Only its input is saved for the backward pass. Raises
    SpecError for a last axis of odd size and a limit that is not positive. arXiv:2508.10925.
    """
    if gate_up.shape[-1] % 2:
        _refuse_odd(gate_up)
    if not limit > 0:
        raise SpecError(f"limit is {limit}: every up would be one number", fix="give a limit above 0, such as 7.0")
    chosen = backend_of("clamped_swiglu", gate_up.device, backend, dtype=gate_up.dtype)
    if chosen == "triton":
        return entry_of(_clamped_op, _clamped, _Clamped, gate_up)(gate_up, limit, alpha)
    return reference.clamped_swiglu(gate_up, limit, alpha)


def _refuse_odd(gate_up: Tensor) -> NoReturn:
    raise SpecError(
        f"gate_up {tuple(gate_up.shape)} cannot be halved: its last axis is odd",
        fix="give [..., 2F]: the gate's F columns, then the up projection's",
    )


# The GPU path: the Triton kernels as torch ops and, for eager calls, as plain autograd Functions.


def _gate(gate_up: Tensor) -> Tensor:
    from hone.ops.activation.triton_kernels import launch_gate

    out = _gate_fake(gate_up)
    launch_gate(gate_up, out)
    return out


_gate_op = torch.library.custom_op("hone::swiglu", _gate, mutates_args=())


@_gate_op.register_fake
def _gate_fake(gate_up: Tensor) -> Tensor:
    return torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)


def _gate_backward(gate_up: Tensor, upstream: Tensor) -> Tensor:
    from hone.ops.activation.triton_kernels import launch_gate_backward

    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    launch_gate_backward(gate_up, upstream, grad)
    return grad


_gate_backward_op = torch.library.custom_op("hone::swiglu_backward", _gate_backward, mutates_args=())


@_gate_backward_op.register_fake
def _gate_backward_fake(gate_up: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


def _gate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gate_grad(run: Callable[..., Any], ctx: Any, upstream: Tensor) -> Tensor:
    grad: Tensor = run(ctx.saved_tensors[0], upstream)
    return grad


_gate_op.register_autograd(partial(_gate_grad, _gate_backward_op), setup_context=_gate_setup)


class _Gate(Function):
    """`hone::swiglu` without the cost of torch's dispatcher."""

    forward, setup_context = staticmethod(_gate), staticmethod(_gate_setup)
    backward = staticmethod(once_differentiable(partial(_gate_grad, _gate_backward)))


def _clamped(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    from hone.ops.activation.triton_kernels import launch_clamped

    out = _gate_fake(gate_up)
    launch_clamped(gate_up, out, limit, alpha)
    return out


_clamped_op = torch.library.custom_op("hone::clamped_swiglu", _clamped, mutates_args=())
_clamped_op.register_fake(lambda gate_up, limit, alpha: _gate_fake(gate_up))


def _clamped_backward(gate_up: Tensor, upstream: Tensor, limit: float, alpha: float) -> Tensor:
    from hone.ops.activation.triton_kernels import launch_clamped_backward

    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    launch_clamped_backward(gate_up, upstream, grad, limit, alpha)
    return grad


_clamped_backward_op = torch.library.custom_op("hone::clamped_swiglu_backward", _clamped_backward, mutates_args=())
_clamped_backward_op.register_fake(lambda gate_up, upstream, limit, alpha: _gate_backward_fake(gate_up, upstream))


def _clamped_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.numbers = inputs[1:]


def _clamped_grad(run: Callable[..., Any], ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
    return run(ctx.saved_tensors[0], upstream, *ctx.numbers), None, None


_clamped_op.register_autograd(partial(_clamped_grad, _clamped_backward_op), setup_context=_clamped_setup)


class _Clamped(Function):
    """`hone::clamped_swiglu` without the cost of torch's dispatcher."""

    forward, setup_context = staticmethod(_clamped), staticmethod(_clamped_setup)
    backward = staticmethod(once_differentiable(partial(_clamped_grad, _clamped_backward)))
