"""Norm, rotation and gate, each in one pass over memory: public functions, their GPU ops and gradients.

On a CPU and under torch.compile (which fuses them itself) they are plain torch. Legend: T tokens, D width, F width of a
feed-forward, H query heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops import lean, reference
from hone.ops.dispatch import backend_of
from hone.ops.paged.api import check_write, write_kv

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The largest code of each kind."""

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

Codes = Literal["fp8", "int8"]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quantize: Codes | None = None,
    *,
    backend: str | None = None,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., D]; arXiv:1910.07467.

    With `residual` (x's shape and dtype) x + residual is normed and returned too: (y, x + residual).
    With `quantize` y comes as codes, float8_e4m3fn or int8, and one float32 scale a row [..., 1] (the row's largest
    magnitude over 448 or 127): (codes, scales) or (codes, scales, x + residual); no gradient flows through codes.
    y has x's dtype, sums are float32 inside; differentiable once. Raises SpecError naming what does not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise SpecError(
            f"weight has {weight.numel()} values in {list(weight.shape)}, x rows have {x.shape[-1]}",
            fix=f"give weight [{x.shape[-1]}]",
        )
    plain = _plain(x) if backend is None else None
    if plain is not None and residual is None and quantize is None:
        return plain.rms_norm(x, weight, eps)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise SpecError(
            f"residual {tuple(residual.shape)} {residual.dtype} is not like x {tuple(x.shape)} {x.dtype}",
            fix="give residual x's shape and dtype: expand it, or cast it with .to(x.dtype)",
        )
    if quantize not in (None, "fp8", "int8"):
        raise SpecError(f"quantize is {quantize!r}; it may be None, 'fp8' or 'int8'", fix="leave it out for x's dtype")
    if plain is None:
        chosen = backend_of("rms_norm", x.device, backend, dtype=x.dtype, weight_dtype=weight.dtype, width=x.shape[-1])
        if chosen == "triton":
            return _rms_norm_triton(x, weight, eps, residual, quantize)
        plain = reference if chosen == "reference" else lean
    summed = x if residual is None else x + residual
    normed = plain.rms_norm(summed, weight, eps)
    if quantize is None:
        return normed if residual is None else (normed, summed)
    codes, scales = row_codes(normed.detach(), quantize)
    return (codes, scales) if residual is None else (codes, scales, summed)


def _plain(x: Tensor) -> Any:
    """The module of plain torch that serves where no kernel would: under torch.compile, and off the GPU; else None."""
    if torch.compiler.is_compiling():
        return reference
    return None if x.is_cuda else lean


def _way(op: Any, bare: Callable[..., Any], graded: type[Function], *given: Tensor | None) -> Any:
    """What runs a kernel: torch's op in a graph; else one of its two twins, which spare most of a small call's time."""
    if torch.compiler.is_compiling():
        return op
    wants = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
    return graded.apply if wants else bare


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: Codes | None) -> Any:
    if quantize:
        x, weight, residual = x.detach(), weight.detach(), None if residual is None else residual.detach()
    run = _way(_norm_op, partial(_normed, False), _Norm, x, weight, residual)
    y, summed, rows = run(x, weight, eps, residual, quantize or "")
    made = (y, rows, summed) if quantize else (y, summed)
    return made if residual is not None else made[:-1] if quantize else y


def row_codes(x: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales [..., 1]) of x [..., D], a scale a row: the reference of `rms_norm`'s quantized output."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = LARGEST[kind]
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    steps = (wide / scales).clamp(-largest, largest)
    codes = steps.to(torch.float8_e4m3fn) if kind == "fp8" else steps.round().to(torch.int8)
    return codes, scales.float()


def swiglu(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202.

    Only its input is kept for the backward pass, which computes the gate again. Differentiable once. Raises SpecError
    for an axis that has no halves.
    """
    if gate_up.shape[-1] % 2:
        raise SpecError(
            f"gate_up {tuple(gate_up.shape)} has no halves: its last axis is odd",
            fix="give [..., 2F]: the gate's F columns, then the up projection's",
        )
    plain = _plain(gate_up) if backend is None else None
    if plain is None:
        chosen = backend_of("swiglu", gate_up.device, backend, dtype=gate_up.dtype)
        if chosen == "triton":
            return _way(_gate_op, _gate, _Gate, gate_up)(gate_up)
        plain = reference if chosen == "reference" else lean
    return plain.swiglu(gate_up)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool = False, backend: str | None = None) -> Tensor:
    """Turns the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]; arXiv:2104.09864.

    `in_place` overwrites x and returns it (serving: no gradient). Differentiable in x. Raises SpecError for an odd Dh and for
    angles of another width.
    """
    if x.shape[-1] % 2:
        raise SpecError(f"x {tuple(x.shape)} has no pairs to turn: its last axis is odd", fix="take an even head_dim")
    plain = _plain(x) if backend is None and not in_place else None
    if plain is None:
        chosen = backend_of("rope", x.device, backend, dtype=x.dtype)
        if chosen == "triton":
            if in_place:
                (_rope_in_place_op if torch.compiler.is_compiling() else _turn_in_place)(x, cos, sin)
                return x
            return _way(_rope_op, _rotated, _Rotated, x)(x, cos, sin, 1.0)
        plain = reference if chosen == "reference" else lean
    _check_angles(x, cos, sin)
    turned = plain.rope(x, cos, sin)
    return x.copy_(turned) if in_place else turned


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Turns q [T, H, Dh] where it lies, and files turned k [T, KV, Dh] and v [T, KV, Dv] in the pages, in one pass.

    cos, sin [T, 1, Dh/2]. Pages, `pages`, `offsets` and the scales of 8-bit pages are those of `hone.ops.write_kv`:
    token t goes to slot offsets[t] of page pages[t], and no place may come twice. No gradient. Raises SpecError as
    `write_kv` does.
    """
    check_write(k, v, k_pages, v_pages, pages, offsets, k_scale, v_scale)
    chosen = backend_of("rope", q.device, backend or (None if q.is_cuda else "lean"), dtype=q.dtype)
    per_token = k_scale is None or (k_scale.dim() == 3 and v_scale is not None and v_scale.dim() == 3)
    if chosen == "triton" and per_token:
        write = _rope_write_op if torch.compiler.is_compiling() else _turn_write
        write(q, k, v, cos, sin, k_pages, v_pages, pages, offsets, k_scale, v_scale)
        return
    _check_angles(q, cos, sin)
    turn = (reference if chosen == "reference" else lean).rope
    q.copy_(turn(q, cos, sin))
    write_kv(turn(k, cos, sin), v, k_pages, v_pages, pages, offsets, k_scale, v_scale)


# What the GPU runs: launches of hone.ops.triton.{norm,pointwise} as torch ops, and for eager calls as plain Functions.


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, codes: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual or empty, of each row float32 1 / rms or with `codes` the scale [..., 1])."""
    return _normed(True, x, weight, eps, residual, codes)


def _normed(
    keeps: bool, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, codes: str
) -> tuple[Tensor, Tensor, Tensor]:
    from hone.ops.norm.triton_kernels import launch_forward

    y, summed, rows = _norm_fake(x, weight, eps, residual, codes)
    rows = rows if keeps or codes else rows.new_empty(0)  # 1 / rms is for a backward pass
    launch_forward(x, residual, weight, y, summed, rows, eps, LARGEST.get(codes, 0.0))
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
    """`hone::rms_norm`, without the dispatcher."""

    forward, setup_context = staticmethod(_norm), staticmethod(_norm_setup)
    backward = staticmethod(once_differentiable(partial(_norm_grad, _norm_backward)))


def _gate(gate_up: Tensor) -> Tensor:
    from hone.ops.rope.triton_kernels import launch_gate

    out = _gate_fake(gate_up)
    launch_gate(gate_up, out)
    return out


_gate_op = torch.library.custom_op("hone::swiglu", _gate, mutates_args=())


@_gate_op.register_fake
def _gate_fake(gate_up: Tensor) -> Tensor:
    return torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)


def _gate_backward(gate_up: Tensor, upstream: Tensor) -> Tensor:
    from hone.ops.rope.triton_kernels import launch_gate_backward

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
    """`hone::swiglu`, without the dispatcher."""

    forward, setup_context = staticmethod(_gate), staticmethod(_gate_setup)
    backward = staticmethod(once_differentiable(partial(_gate_grad, _gate_backward)))


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = x.shape[-1] // 2
    if cos.shape[-2:] != (1, half) or sin.shape != cos.shape:
        raise SpecError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not turn x {tuple(x.shape)}",
            fix=f"give both as [..., 1, {half}], the axes before them like x's or 1",
        )


def angle_rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as [rows, Dh/2], where token t of x takes row t % rows; copies only if they neither match nor repeat."""
    _check_angles(x, cos, sin)
    half, lead = x.shape[-1] // 2, x.shape[:-2]
    kept = list(cos.shape[:-2])
    while kept and kept[0] == 1:
        kept.pop(0)
    if kept != list(lead[len(lead) - len(kept) :]):
        cos, sin = (one.view(*kept, 1, half).expand(*lead, 1, half) for one in (cos, sin))
    return cos.reshape(-1, half).contiguous(), sin.reshape(-1, half).contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    from hone.ops.rope.triton_kernels import launch_turn

    out = _rope_fake(x, cos, sin, sign)
    x = x if x.stride(-1) == 1 else x.contiguous()
    launch_turn(x.reshape(-1, *x.shape[-2:]), out.view(-1, *x.shape[-2:]), *angle_rows(x, cos, sin), sign)
    return out


_rope_op = torch.library.custom_op("hone::rope", _rotated, mutates_args=())


@_rope_op.register_fake
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sign = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def _rope_grad(turn: Callable[..., Tensor], ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    return turn(upstream, *ctx.saved_tensors, -ctx.sign), None, None, None


_rope_op.register_autograd(partial(_rope_grad, _rope_op), setup_context=_rope_setup)


class _Rotated(Function):
    """`hone::rope`, without the dispatcher."""

    forward, setup_context = staticmethod(_rotated), staticmethod(_rope_setup)
    backward = staticmethod(lambda ctx, upstream: _rope_grad(_Rotated.apply, ctx, upstream))


def _turn_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    from hone.ops.rope.triton_kernels import launch_turn

    if x.stride(-1) != 1:
        said = f"x with strides {x.stride()} cannot be turned in place: its last axis must be contiguous"
        raise SpecError(said, fix="give x.contiguous() and use what comes back, or leave in_place out")
    tokens = x.view(-1, *x.shape[-2:])
    launch_turn(tokens, tokens, *angle_rows(x, cos, sin), 1.0)


def _turn_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    from hone.ops.rope.triton_kernels import launch_turn_write

    for name, one in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if one.stride(-1) != 1:
            said = f"{name} with strides {one.stride()} cannot be written in place: its last axis has gaps"
            raise SpecError(said, fix=f"make {name} with contiguous rows, such as {name}.contiguous()")
    k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (k, v))
    pages, offsets = pages.contiguous(), offsets.contiguous()
    angles = angle_rows(q, cos.expand(len(q), 1, -1), sin.expand(len(q), 1, -1))
    largest = LARGEST["int8" if k_pages.dtype == torch.int8 else "fp8"]
    launch_turn_write(q, k, v, *angles, k_pages, v_pages, pages, offsets, k_scale, v_scale, largest)


_rope_in_place_op = torch.library.custom_op("hone::rope_in_place", _turn_in_place, mutates_args=("x",))
_rope_write_op = torch.library.custom_op(
    "hone::rope_write", _turn_write, mutates_args=("q", "k_pages", "v_pages", "k_scale", "v_scale")
)


@_rope_in_place_op.register_fake
def _rope_in_place_fake(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


@_rope_write_op.register_fake
def _rope_write_fake(*given: Tensor | None) -> None:
    return None
