"""The factors of fp8 products and the products themselves, in any recipe: on a GPU by kernels and libraries, else by the reference.

Legend: M rows of x, N output features, K input features.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.dispatch import backend_of
from hone.ops.fp8 import blocks, reference
from hone.ops.fp8.recipes import RECIPES, Recipe

E4M3 = torch.float8_e4m3fn
Codes = tuple[Tensor, Tensor, Tensor, Tensor]
"""(codes [M, K], scales, codes of the transpose [K, M], their scales); empty where not asked for."""


class WeightCodes(NamedTuple):
    """A weight [N, K] as the forward pass multiplies it, codes [N, K], and as the gradient of its input does, codes [K, N].

    Those of several experts, in recipes with scales of rows, are [E, N, K] and [E, K, N] with scales [E, N] and [E, K].
    """

    codes: Tensor
    scales: Tensor
    """float32 [N], [1] of the whole tensor, or [N / 128, K / 128]."""
    codes_t: Tensor
    scales_t: Tensor
    """float32 [K], [1], or [K / 128, N / 128]."""


def weight_codes(weight: Tensor, recipe: str) -> WeightCodes:
    """Both codes of weight [N, K] or [E, N, K], e4m3, from one read (after that for the scales, where they are not of blocks)."""
    how = RECIPES[recipe]
    with torch.no_grad():
        return WeightCodes(*cast(weight, how, E4M3, maxima(weight, how), rows=True, columns=True, weight=True))


def scales_shape(rows: int, width: int, how: Recipe, *, weight: bool = False) -> tuple[int, ...]:
    """Of the scales of codes [rows, width]."""
    if how.blockwise:
        return blocks.scales_shape(rows, width, square=weight)
    return (1,) if how.tensorwise else (rows,)


def maxima(x: Tensor, how: Recipe) -> tuple[Tensor, Tensor]:
    """What a cast of x [M, K] needs to know before (`reference.maxima`); in blocks nothing, so it is empty."""
    if how.blockwise:
        none = torch.empty(0, dtype=torch.int32, device=x.device)
        return none, none
    if _kernels(x):
        from hone.ops.fp8.triton_kernels import maxima as found

        return found(x, how.tensorwise)
    return reference.maxima(x, how.tensorwise)


def cast(
    x: Tensor, how: Recipe, dtype: torch.dtype, largest: tuple[Tensor, Tensor], *,
    rows: bool, columns: bool, weight: bool = False,
) -> Codes:  # fmt: skip
    """The codes of x [M, K] (`rows`) and of its transpose (`columns`); `largest` are those of `maxima`."""
    if how.blockwise:
        return _cast_blocks(x, dtype, square=weight, rows=rows, columns=columns)
    if _kernels(x):
        from hone.ops.fp8.triton_kernels import cast as run

        return run(x, largest, dtype, how.tensorwise, rows=rows, columns=columns)
    by_row = reference.codes_of(x, largest[0], dtype, columns=False) if rows else _none(x, dtype)
    return *by_row, *(reference.codes_of(x, largest[1], dtype, columns=True) if columns else _none(x, dtype))


def _cast_blocks(x: Tensor, dtype: torch.dtype, *, square: bool, rows: bool, columns: bool) -> Codes:
    if _kernels(x):
        from hone.ops.fp8.triton_blocks import cast as run

        return run(x, dtype, square=square, rows=rows, columns=columns)
    by_row = blocks.block_codes(x, dtype, square=square, columns=False) if rows else _none(x, dtype)
    return *by_row, *(blocks.block_codes(x, dtype, square=square, columns=True) if columns else _none(x, dtype))


def _none(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)


def _kernels(x: Tensor) -> bool:
    return backend_of("fp8_cast", x.device, None, dtype=x.dtype) == "triton"


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, how: Recipe,
    which: int, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Codes a [M, K] times codes b [N, K] transposed: [M, N]. `which`: 0 forward, 1 the input's gradient, 2 the weight's.

    `backend` forces that of products in blocks.
    """
    if how.blockwise:
        return _block_product(a, a_scales, b, b_scales, bias, dtype, square=which < 2, backend=backend)
    if a.device.type != "cuda":
        return reference.product(a, a_scales, b, b_scales, bias, dtype)
    if len(a_scales) == len(b_scales) == 1:
        a_scales, b_scales = a_scales[0], b_scales[0]
    else:
        a_scales, b_scales = a_scales[:, None], b_scales[None, :]
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scales, scale_b=b_scales, bias=bias, out_dtype=dtype, use_fast_accum=how.fast[which]
    )


def _block_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *,
    square: bool, backend: str | None,
) -> Tensor:  # fmt: skip
    case: dict[str, Any] = {"dtype": dtype, "columns": len(b), "width": a.shape[1], "square": square}
    chosen = backend_of("fp8_block_product", a.device, backend, **case, library=has_block_products())
    if chosen == "reference":
        return blocks.block_product(a, a_scales, b, b_scales, bias, dtype, square=square)
    if chosen == "triton":
        from hone.ops.fp8.triton_blocks import product as run

        return run(a, a_scales, b, b_scales, bias, dtype, square=square)
    from torch.nn.functional import ScalingType

    tiles = ScalingType.BlockWise1x128
    out: Tensor = F.scaled_mm(
        a, b.t(), scale_a=a_scales.t(), scale_recipe_a=tiles, scale_b=b_scales.t(),
        scale_recipe_b=ScalingType.BlockWise128x128 if square else tiles, output_dtype=dtype,
    )  # fmt: skip
    return out if bias is None else out + bias  # rarely there, and not every epilogue of cuBLAS has it


@cache
def has_block_products() -> bool:
    """Whether this torch has cuBLAS's products in blocks of 128: CUDA 12.9 or later, and the function for them."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return version >= (12, 9) and hasattr(F, "scaled_mm") and hasattr(F, "ScalingType")
