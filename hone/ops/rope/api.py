"""Rotary position embedding in one pass over memory: public functions, their GPU ops and the gradient.

Legend: T tokens, H query heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.entry import entry_of
from hone.ops.formats import LARGEST
from hone.ops.norm.api import rms_norm
from hone.ops.paged.api import check_write, write_kv
from hone.ops.rope import reference, torch_calls


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool = False, backend: str | None = None) -> Tensor:
    """Rotates the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]; arXiv:2104.09864.

    Used in training and inference. Differentiable in x any number of times: the gradient is the inverse rotation, so only the
    angles are saved. Backends: on a GPU the Triton kernel for 16- and 32-bit x; under torch.compile plain torch, which the
    compiler fuses with the operations around it; elsewhere torch calls. Without gradients nothing is saved. `in_place`
    overwrites x and returns it; no gradient. Raises SpecError for an odd Dh and for angles of another width.
    """
    if x.shape[-1] % 2:
        raise SpecError(f"x {tuple(x.shape)} has no pairs to rotate: its last axis is odd", fix="give an even head_dim")
    chosen = backend_of("rope_in_place" if in_place else "rope", x.device, backend, dtype=x.dtype)
    if chosen == "triton":
        if in_place:
            (_rope_in_place_op if torch.compiler.is_compiling() else _rotate_in_place)(x, cos, sin)
            return x
        return entry_of(_rope_op, _rotated, _Rotated, x)(x, cos, sin, 1.0)
    _check_angles(x, cos, sin)
    turned = (torch_calls if chosen == "torch" else reference).rope(x, cos, sin)
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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    backend: str | None = None,
) -> None:
    """Rotates q [T, H, Dh] in place, and writes rotated k [T, KV, Dh] and v [T, KV, Dv] into the pages, in one pass.

    cos, sin [T, 1, Dh/2]. Pages, `pages`, `offsets` and the scales of 8-bit pages are those of `hone.ops.write_kv`:
    token t goes to slot offsets[t] of page pages[t], and no slot may occur twice. With `q_norm` and `k_norm` [Dh] each
    query and key head is normed before its rotation, as `hone.ops.rms_norm` does with these weights and `eps`
    (query-key norm; arXiv:2302.05442). No gradient. Raises SpecError as `write_kv` does, and for norms that do not fit.
    """
    check_write(k, v, k_pages, v_pages, pages, offsets, k_scale, v_scale)
    _check_norms(q, q_norm, k_norm)
    chosen = backend_of("rope_write", q.device, backend, dtype=q.dtype)
    if chosen == "triton":
        write = _rope_write_op if torch.compiler.is_compiling() else _rotate_write
        write(q, k, v, cos, sin, k_pages, v_pages, pages, offsets, k_scale, v_scale, q_norm, k_norm, eps)
        return
    _check_angles(q, cos, sin)
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps, backend=backend))
        k = rms_norm(k, k_norm, eps, backend=backend)
    turn = (reference if chosen == "reference" else torch_calls).rope
    q.copy_(turn(q, cos, sin))
    write_kv(turn(k, cos, sin), v, k_pages, v_pages, pages, offsets, k_scale, v_scale)


def _check_norms(q: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if (weight is None) != (q_norm is None) or (weight is not None and weight.shape != q.shape[-1:]):
            said = "is missing" if weight is None else f"{tuple(weight.shape)} does not fit q {tuple(q.shape)}"
            raise SpecError(f"{name} {said}", fix=f"give both q_norm and k_norm [{q.shape[-1]}], or neither")


# The GPU path: the Triton kernels as torch ops and, for eager calls, as plain autograd Functions.


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = x.shape[-1] // 2
    if cos.shape[-2:] != (1, half) or sin.shape != cos.shape:
        raise SpecError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}",
            fix=f"give both as [..., 1, {half}], the axes before them like x's or 1",
        )


def angle_rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as [rows, Dh/2]; token t of x uses row t % rows. Copies only if their axes neither match x's nor repeat."""
    _check_angles(x, cos, sin)
    half, lead = x.shape[-1] // 2, x.shape[:-2]
    kept = list(cos.shape[:-2])
    while kept and kept[0] == 1:
        kept.pop(0)
    if kept != list(lead[len(lead) - len(kept) :]):
        cos, sin = (one.view(*kept, 1, half).expand(*lead, 1, half) for one in (cos, sin))
    return cos.reshape(-1, half).contiguous(), sin.reshape(-1, half).contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    from hone.ops.rope.triton_kernels import launch_rope

    out = _rope_fake(x, cos, sin, sign)
    x = x if x.stride(-1) == 1 else x.contiguous()
    launch_rope(x.reshape(-1, *x.shape[-2:]), out.view(-1, *x.shape[-2:]), *angle_rows(x, cos, sin), sign)
    return out


_rope_op = torch.library.custom_op("hone::rope", _rotated, mutates_args=())


@_rope_op.register_fake
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sign = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def _rope_grad(rotate: Callable[..., Tensor], ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    return rotate(upstream, *ctx.saved_tensors, -ctx.sign), None, None, None


_rope_op.register_autograd(partial(_rope_grad, _rope_op), setup_context=_rope_setup)


class _Rotated(Function):
    """`hone::rope` without the cost of torch's dispatcher."""

    forward, setup_context = staticmethod(_rotated), staticmethod(_rope_setup)
    backward = staticmethod(lambda ctx, upstream: _rope_grad(_Rotated.apply, ctx, upstream))


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    from hone.ops.rope.triton_kernels import launch_rope

    if x.stride(-1) != 1:
        said = f"x with strides {x.stride()} cannot be rotated in place: its last axis must be contiguous"
        raise SpecError(said, fix="give x.contiguous() and use the returned tensor, or leave in_place out")
    tokens = x.view(-1, *x.shape[-2:])
    launch_rope(tokens, tokens, *angle_rows(x, cos, sin), 1.0)


def _rotate_write(
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
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    from hone.ops.rope.triton_kernels import launch_rope_write

    for name, one in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if one.stride(-1) != 1:
            said = f"{name} with strides {one.stride()} cannot be written in place: its last axis is not contiguous"
            raise SpecError(said, fix=f"make {name} with contiguous rows, such as {name}.contiguous()")
    k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (k, v))
    pages, offsets = pages.contiguous(), offsets.contiguous()
    angles = angle_rows(q, cos.expand(len(q), 1, -1), sin.expand(len(q), 1, -1))
    largest = LARGEST.get(k_pages.dtype, 0.0)
    norms = None if q_norm is None or k_norm is None else (q_norm.contiguous(), k_norm.contiguous())
    launch_rope_write(q, k, v, *angles, k_pages, v_pages, pages, offsets, k_scale, v_scale, largest, norms, eps)


_rope_in_place_op = torch.library.custom_op("hone::rope_in_place", _rotate_in_place, mutates_args=("x",))
_rope_write_op = torch.library.custom_op(
    "hone::rope_write", _rotate_write, mutates_args=("q", "k_pages", "v_pages", "k_scale", "v_scale")
)


@_rope_in_place_op.register_fake
def _rope_in_place_fake(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


@_rope_write_op.register_fake
def _rope_write_fake(*given: Tensor | float | None) -> None:
    return None
