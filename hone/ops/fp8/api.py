"""A linear layer in training with fp8 products: the public function, its op and its gradient.

Legend: M rows of x, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hone.base.errors import SpecError
from hone.ops.entry import entry_of
from hone.ops.fp8.factors import E4M3, WeightCodes, cast, maxima, product, scales_shape
from hone.ops.fp8.recipes import MULTIPLE, RECIPES


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
    check_sizes(x, weight, recipe)
    run = entry_of(_linear_op, linear_forward, _Linear, x, weight, bias)
    y, *_ = run(x, weight, bias, *(held or (None, None, None, None)), recipe)
    return y


def check_sizes(x: Tensor, weight: Tensor, recipe: str) -> None:
    """Raises SpecError as `fp8_trained_linear` does."""
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


# The op, and for eager calls a plain autograd Function, which avoids torch's dispatcher.


def linear_forward(
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
    x_codes, x_scales, x_codes_t, x_scales_t = cast(
        rows, how, E4M3, maxima(rows, how), rows=True, columns=how.weight_gradient
    )
    of_columns = torch.empty(0, dtype=torch.int32, device=x.device)
    if codes is None or scales is None:
        largest = maxima(weight, how)
        of_columns = largest[1]
        codes, scales, *_ = cast(weight, how, E4M3, largest, rows=True, columns=False, weight=True)
    y = product(x_codes, x_scales, codes, scales, bias, x.dtype, how, 0)
    return y.view(*x.shape[:-1], len(weight)), x_codes_t, x_scales_t, of_columns


_linear_op = torch.library.custom_op("hone::fp8_trained_linear", linear_forward, mutates_args=())


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
        x.new_empty(scales_shape(columns, num_rows, how) if kept else (0,), dtype=torch.float32),
        x.new_empty(0 if codes is not None or how.blockwise else 1 if how.tensorwise else columns, dtype=torch.int32),
    )


def backward_in_parts(
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
) -> tuple[Tensor, Callable[[], Tensor]]:
    """(gradient by x [..., K], empty where it is not wanted, and what computes that by weight [N, K]) of what a forward pass
    saved (`saved`).

    The second holds what its product reads: two matrices of codes, or of the dtype of x where the recipe has it in that.
    """
    how = RECIPES[recipe]
    rows, gradient = _rows(upstream), getattr(torch, how.gradient)
    by_code = wants_weight and how.weight_gradient
    grad_x, dtype = upstream.new_empty(0), weight.dtype
    if wants_x or by_code:
        found = cast(rows, how, gradient, maxima(rows, how), rows=wants_x, columns=by_code)
        dy_codes, dy_scales, dy_codes_t, dy_scales_t = found
    if wants_x:
        if codes_t is None or scales_t is None:
            largest = (of_columns, of_columns)
            *_, codes_t, scales_t = cast(weight, how, E4M3, largest, rows=False, columns=True, weight=True)
        grad_x = product(dy_codes, dy_scales, codes_t, scales_t, None, upstream.dtype, how, 1)
        grad_x = grad_x.view(*upstream.shape[:-1], weight.shape[1])
    if by_code:
        return grad_x, lambda: product(dy_codes_t, dy_scales_t, x_codes_t, x_scales_t, None, dtype, how, 2)

    def wide() -> Tensor:
        assert x is not None, "this recipe keeps x"
        return rows.t() @ x.reshape(-1, x.shape[-1])

    return grad_x, wide


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
    kept = (x, x_codes_t, x_scales_t, weight, of_columns, codes_t, scales_t)
    grad_x, of_weight = backward_in_parts(upstream, *kept, wants_x, wants_weight, recipe)
    return grad_x, of_weight() if wants_weight else weight.new_empty(0)


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
    ctx.recipe, ctx.biased = inputs[-1], inputs[2] is not None
    ctx.save_for_backward(*saved(inputs, output))
    ctx.set_materialize_grads(False)


def saved(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """What `backward_in_parts` reads, of the arguments of `linear_forward` and what it gave."""
    x, weight, _, _, _, codes_t, scales_t, recipe = inputs
    _, x_codes_t, x_scales_t, of_columns = output
    kept = None if RECIPES[recipe].weight_gradient else x
    return kept, x_codes_t, x_scales_t, weight, of_columns, codes_t, scales_t


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

    forward, setup_context = staticmethod(linear_forward), staticmethod(_setup_eager)
    backward = staticmethod(once_differentiable(partial(_grad, _linear_backward)))


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as contiguous rows [M, K]; a copy only where they are not."""
    return x.reshape(-1, x.shape[-1]).contiguous()
