"""The linears of several experts in training with fp8 products: the public function, its op and its gradient.

Legend: T rows sorted by expert, E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.fp8 import reference
from hone.ops.fp8.factors import E4M3, WeightCodes, cast, maxima
from hone.ops.fp8.recipes import MULTIPLE, RECIPES
from hone.ops.moe import reference as wide

EXPERT_RECIPES = tuple(name for name, how in RECIPES.items() if not how.tensorwise and not how.blockwise)
"""Those with scales of rows: an expert's rows are some of a factor's rows, whose scales then need nothing of the others."""


def fp8_grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, *, recipe: str = "rowwise", held: WeightCodes | None = None
) -> Tensor:
    """x [T, K], rows sorted by expert, times the transpose of their expert's weight [E, N, K]: [T, N], by products of fp8 codes.

    As `hone.ops.grouped_linear`, with ends int32 [E], and as `hone.ops.fp8_trained_linear`, with the recipes `EXPERT_RECIPES`: each
    row of x, of an expert's weight and of the gradient has its own scale; the gradient by the weight sums codes whose scales are of
    a feature over all experts' rows. Nothing is padded. `held`: the codes of this weight (`weight_codes`). On a CPU codes are decoded
    and multiplied in float32. Raises SpecError where N or K is no multiple of 16, or shapes or recipe do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or ends.shape != weight.shape[:1]:
        raise SpecError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, ends {tuple(ends.shape)} do not fit",
            fix="give x [T, K], weight [E, N, K] of at least one expert, and the ends [E] of permute",
        )
    if recipe not in EXPERT_RECIPES:
        raise SpecError(f"recipe is {recipe!r}", fix=f"give one of {', '.join(EXPERT_RECIPES)}")
    if any(size % MULTIPLE for size in weight.shape[1:]):
        raise SpecError(
            f"fp8 products need multiples of {MULTIPLE}, and these experts have {weight.shape[1]} output and {weight.shape[2]} input features",
            fix="change intermediate_size or hidden_size, or compute these experts in bf16",
        )
    y, *_ = _grouped_op(x, weight, ends, *(held or (None, None, None, None)), recipe)
    return y


def grouped_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Codes a [T, K] of rows sorted by expert times codes b [E, N, K] of their expert transposed: [T, N]."""
    if backend_of("fp8_grouped_linear", a.device, None) == "reference":
        return reference.grouped_product(a, a_scales, b, b_scales, ends, dtype)
    from hone.ops.moe.gluon_grouped import by_rows

    return by_rows(a, b, ends, scales=(a_scales, b_scales), dtype=dtype)


def grouped_sums(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes a [N, T] times codes b [K, T] transposed, summed over each expert's rows: [E, N, K]."""
    if backend_of("fp8_grouped_linear", a.device, None) == "reference":
        return reference.grouped_sums(a, a_scales, b, b_scales, ends, dtype)
    from hone.ops.moe.gluon_grouped_sums import by_weights

    return by_weights(a, b, ends, scales=(a_scales, b_scales), dtype=dtype)


def _wide_sums(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient by the weight in the factors' dtype."""
    if backend_of("fp8_grouped_linear", dy.device, None) == "reference":
        return wide.grouped_sums(dy, x, ends)
    from hone.ops.moe.gluon_grouped_sums import by_weights

    return by_weights(dy, x, ends)


@torch.library.custom_op("hone::fp8_grouped_linear", mutates_args=())
def _grouped_op(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    codes: Tensor | None,
    scales: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, codes of x transposed [K, T rounded up to a multiple of 16], their scales [K]); the last two are empty where not kept."""
    how, rows = RECIPES[recipe], x.contiguous()
    found = cast(rows, how, E4M3, maxima(rows, how), rows=True, columns=how.weight_gradient)
    x_codes, x_scales, x_codes_t, x_scales_t = found
    if codes is None or scales is None:
        codes, scales, *_ = cast(weight, how, E4M3, maxima(weight, how), rows=True, columns=False, weight=True)
    y = grouped_product(x_codes, x_scales, codes, scales, ends, x.dtype)
    return y, _whole_rows(x_codes_t), x_scales_t


def _whole_rows(codes_t: Tensor) -> Tensor:
    """Transposed codes [K, T] with the bytes between their rows as a part: an op's results are contiguous."""
    if codes_t.dim() < 2 or not codes_t.shape[1] % MULTIPLE:
        return codes_t
    width = -(-codes_t.shape[1] // MULTIPLE) * MULTIPLE
    whole = codes_t.new_zeros(codes_t.shape[0], width) if codes_t.stride(0) != width else None
    if whole is None:
        return codes_t.as_strided((codes_t.shape[0], width), (width, 1))
    whole[:, : codes_t.shape[1]] = codes_t
    return whole


@_grouped_op.register_fake
def _grouped_fake(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    codes: Tensor | None,
    scales: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, columns), kept = x.shape, RECIPES[recipe].weight_gradient
    width = -(-num_rows // MULTIPLE) * MULTIPLE
    return (
        x.new_empty(num_rows, weight.shape[1]),
        x.new_empty((columns, width) if kept else (0,), dtype=E4M3),
        x.new_empty((columns,) if kept else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("hone::fp8_grouped_linear_backward", mutates_args=())
def _backward_op(
    upstream: Tensor,
    x: Tensor | None,
    x_codes_t: Tensor,
    x_scales_t: Tensor,
    weight: Tensor,
    ends: Tensor,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    wants_x: bool,
    wants_weight: bool,
    recipe: str,
) -> tuple[Tensor, Tensor]:
    """(gradient by x [T, K], gradient by weight [E, N, K]), each empty where it is not wanted."""
    how, rows = RECIPES[recipe], upstream.contiguous()
    by_code = wants_weight and how.weight_gradient
    grad_x, grad_weight = upstream.new_empty(0), weight.new_empty(0)
    if wants_x or by_code:
        gradient = getattr(torch, how.gradient)
        dy, dy_scales, dy_t, dy_scales_t = cast(rows, how, gradient, maxima(rows, how), rows=wants_x, columns=by_code)
    if wants_x:
        if codes_t is None or scales_t is None:
            largest = maxima(weight, how)
            *_, codes_t, scales_t = cast(weight, how, E4M3, largest, rows=False, columns=True, weight=True)
        grad_x = grouped_product(dy, dy_scales, codes_t, scales_t, ends, upstream.dtype)
    if by_code:
        grad_weight = grouped_sums(dy_t, dy_scales_t, x_codes_t[:, : len(rows)], x_scales_t, ends, weight.dtype)
    elif wants_weight:
        assert x is not None, "this recipe keeps x"
        grad_weight = _wide_sums(rows, x.contiguous(), ends)
    return grad_x, grad_weight


@_backward_op.register_fake
def _backward_fake(
    upstream: Tensor,
    x: Tensor | None,
    x_codes_t: Tensor,
    x_scales_t: Tensor,
    weight: Tensor,
    ends: Tensor,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    wants_x: bool,
    wants_weight: bool,
    recipe: str,
) -> tuple[Tensor, Tensor]:
    grad_x = upstream.new_empty((len(upstream), weight.shape[2]) if wants_x else (0,))
    return grad_x, weight.new_empty(weight.shape if wants_weight else (0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ends, _, _, codes_t, scales_t, recipe = inputs
    kept = None if RECIPES[recipe].weight_gradient else x
    ctx.save_for_backward(kept, *output[1:], weight, ends, codes_t, scales_t)
    ctx.recipe = recipe
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 8
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    grad_x, grad_weight = _backward_op(upstream, *ctx.saved_tensors, wants_x, wants_weight, ctx.recipe)
    return grad_x if wants_x else None, grad_weight if wants_weight else None, *(None,) * 6


_grouped_op.register_autograd(_grad, setup_context=_setup)
