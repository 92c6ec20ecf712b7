"""A linear layer in training with fp8 products: the public function, its op and its gradient.

Legend: M rows of x, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.entry import entry_of
from hone.ops.fp8 import reference
from hone.ops.fp8.recipes import MULTIPLE, RECIPES, Recipe

E4M3 = torch.float8_e4m3fn


class WeightCodes(NamedTuple):
    """A weight [N, K] as the forward pass multiplies it, codes [N, K], and as the gradient of its input does, codes [K, N]."""

    codes: Tensor
    scales: Tensor
    """float32 [N], or [1] of the whole tensor."""
    codes_t: Tensor
    scales_t: Tensor
    """float32 [K], or [1]."""


def fp8_trained_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "rowwise", held: WeightCodes | None = None
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype, by products of fp8 codes.

    So are the gradients of x and weight, as `recipe` of `RECIPES` says; sums are float32. `held`: the codes of this
    weight (`weight_codes`), which are otherwise computed here and again in the backward pass. What stays for the backward
    pass is the fp8 codes of x, transposed, where the recipe has the weight's gradient in fp8.
    On a CPU codes are decoded and multiplied in float32. Differentiable once. Raises SpecError where a size is no multiple of
    16, MachineError on a GPU without fp8.
    """
    num_rows = x.numel() // max(1, x.shape[-1])
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise SpecError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in columns",
            fix="give x [..., K] and weight [N, K], output features first",
        )
    if recipe not in RECIPES:
        raise SpecError(f"recipe is {recipe!r}", fix=f"give one of {', '.join(RECIPES)}")
    sizes = (num_rows, *weight.shape)
    if any(size % MULTIPLE for size in sizes):
        raise SpecError(
            f"fp8 products need multiples of {MULTIPLE}, and this one has {sizes[0]} rows, {sizes[1]} output and "
            f"{sizes[2]} input features",
            fix="change seq_len or the number of sequences of a pass, or compute this layer in bf16",
        )
    run = entry_of(_linear_op, _linear, _Linear, x, weight, bias)
    y, *_ = run(x, weight, bias, *(held or (None, None, None, None)), recipe)
    return y


def weight_codes(weight: Tensor, recipe: str) -> WeightCodes:
    """Both codes of weight [N, K], e4m3, from one read after that for the scales."""
    tensorwise = RECIPES[recipe].tensorwise
    with torch.no_grad():
        largest = _maxima(weight, tensorwise)
        return WeightCodes(*_cast(weight, largest, E4M3, tensorwise, rows=True, columns=True))


def _kernels(x: Tensor) -> bool:
    return backend_of("fp8_cast", x.device, None, dtype=x.dtype) == "triton"


def _maxima(x: Tensor, tensorwise: bool) -> tuple[Tensor, Tensor]:
    if _kernels(x):
        from hone.ops.fp8.triton_kernels import maxima

        return maxima(x, tensorwise)
    return reference.maxima(x, tensorwise)


def _cast(
    x: Tensor, largest: tuple[Tensor, Tensor], dtype: torch.dtype, tensorwise: bool, *, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [M, K], scales, codes of the transpose [K, M], their scales); empty where not asked for."""
    if _kernels(x):
        from hone.ops.fp8.triton_kernels import cast

        return cast(x, largest, dtype, tensorwise, rows=rows, columns=columns)
    none = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    by_row = reference.codes_of(x, largest[0], dtype, columns=False) if rows else none
    return *by_row, *(reference.codes_of(x, largest[1], dtype, columns=True) if columns else none)


def _product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Codes a [M, K] times codes b [N, K] transposed: [M, N]."""
    if a.device.type != "cuda":
        return reference.product(a, a_scales, b, b_scales, bias, dtype)
    if len(a_scales) == len(b_scales) == 1:
        a_scales, b_scales = a_scales[0], b_scales[0]
    else:
        a_scales, b_scales = a_scales[:, None], b_scales[None, :]
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scales, scale_b=b_scales, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )


# The op, and for eager calls a plain autograd Function, which avoids torch's dispatcher.


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, codes of x transposed [K, M] and their scales or empty, bits of the largest magnitudes of the weight's columns)."""
    how = RECIPES[recipe]
    rows = _rows(x)
    largest = _maxima(rows, how.tensorwise)
    x_codes, x_scales, x_codes_t, x_scales_t = _cast(
        rows, largest, E4M3, how.tensorwise, rows=True, columns=how.weight_gradient
    )
    of_columns = torch.empty(0, dtype=torch.int32, device=x.device)
    if codes is None or scales is None:
        of_rows, of_columns = _maxima(weight, how.tensorwise)
        codes, scales, *_ = _cast(weight, (of_rows, of_columns), E4M3, how.tensorwise, rows=True, columns=False)
    y = _product(x_codes, x_scales, codes, scales, bias, x.dtype, how.fast[0])
    return y.view(*x.shape[:-1], len(weight)), x_codes_t, x_scales_t, of_columns


_linear_op = torch.library.custom_op("hone::fp8_trained_linear", _linear, mutates_args=())


@_linear_op.register_fake
def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how, num_rows, columns = RECIPES[recipe], x.numel() // x.shape[-1], x.shape[-1]
    kept = how.weight_gradient
    return (
        x.new_empty(*x.shape[:-1], weight.shape[0]),
        x.new_empty((columns, num_rows) if kept else (0,), dtype=E4M3),
        x.new_empty((1 if how.tensorwise else columns) if kept else 0, dtype=torch.float32),
        x.new_empty(0 if codes is not None else 1 if how.tensorwise else columns, dtype=torch.int32),
    )


def _linear_backward(
    upstream: Tensor,
    x: Tensor | None,
    x_codes_t: Tensor,
    x_scales_t: Tensor,
    weight: Tensor,
    of_columns: Tensor,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    wants_x: bool,
    wants_weight: bool,
    recipe: str,
) -> tuple[Tensor, Tensor]:
    """(gradient by x [..., K], gradient by weight [N, K]), each empty where it is not wanted."""
    how = RECIPES[recipe]
    rows, gradient = _rows(upstream), getattr(torch, how.gradient)
    by_code = wants_weight and how.weight_gradient
    grad_x, grad_weight = upstream.new_empty(0), weight.new_empty(0)
    if wants_x or by_code:
        largest = _maxima(rows, how.tensorwise)
        found = _cast(rows, largest, gradient, how.tensorwise, rows=wants_x, columns=by_code)
        dy_codes, dy_scales, dy_codes_t, dy_scales_t = found
    if wants_x:
        if codes_t is None or scales_t is None:
            largest = (of_columns, of_columns)
            *_, codes_t, scales_t = _cast(weight, largest, E4M3, how.tensorwise, rows=False, columns=True)
        grad_x = _product(dy_codes, dy_scales, codes_t, scales_t, None, upstream.dtype, how.fast[1])
        grad_x = grad_x.view(*upstream.shape[:-1], weight.shape[1])
    if by_code:
        grad_weight = _product(dy_codes_t, dy_scales_t, x_codes_t, x_scales_t, None, weight.dtype, how.fast[2])
    elif wants_weight:
        assert x is not None, "this recipe keeps x"
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
    return grad_x, grad_weight


_linear_backward_op = torch.library.custom_op("hone::fp8_trained_linear_backward", _linear_backward, mutates_args=())


@_linear_backward_op.register_fake
def _linear_backward_fake(
    upstream: Tensor,
    x: Tensor | None,
    x_codes_t: Tensor,
    x_scales_t: Tensor,
    weight: Tensor,
    of_columns: Tensor,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    wants_x: bool,
    wants_weight: bool,
    recipe: str,
) -> tuple[Tensor, Tensor]:
    grad_x = upstream.new_empty((*upstream.shape[:-1], weight.shape[1]) if wants_x else (0,))
    return grad_x, weight.new_empty(weight.shape if wants_weight else (0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, codes_t, scales_t, recipe = inputs
    _, x_codes_t, x_scales_t, of_columns = output
    how: Recipe = RECIPES[recipe]
    kept = None if how.weight_gradient else x
    ctx.recipe, ctx.biased = recipe, bias is not None
    ctx.save_for_backward(kept, x_codes_t, x_scales_t, weight, of_columns, codes_t, scales_t)
    ctx.set_materialize_grads(False)


def _grad(run: Callable[..., Any], ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None, None, None, None, None)
    if upstream is None:
        return None, None, None, *none
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_x, grad_weight = run(upstream, *ctx.saved_tensors, wants_x, wants_weight, ctx.recipe)
    bias = upstream.reshape(-1, upstream.shape[-1]).sum(0) if ctx.biased and wants_bias else None
    return grad_x if wants_x else None, grad_weight if wants_weight else None, bias, *none


_linear_op.register_autograd(partial(_grad, _linear_backward_op), setup_context=_setup)


def _setup_eager(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _setup(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


class _Linear(Function):
    """`hone::fp8_trained_linear` without the cost of torch's dispatcher."""

    forward, setup_context = staticmethod(_linear), staticmethod(_setup_eager)
    backward = staticmethod(once_differentiable(partial(_grad, _linear_backward)))


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as contiguous rows [M, K]; a copy only where they are not."""
    return x.reshape(-1, x.shape[-1]).contiguous()
