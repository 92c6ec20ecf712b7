"""Rounding to an integer grid that gradients pass: what training computes with where a quantized weight will be served.

Shapes: N rows, K columns, G groups per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.ops.formats import code_range
from hone.ops.rounding.integer_grid import Grid


def fake_quantize(weights: Tensor, grid: Grid, bits: int) -> Tensor:
    """Weights [N, K] rounded to the nearest points of `grid` and back, in their dtype; differentiable.

    Rounding has slope one, and zero where it clamps: the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432). A
    grid whose scales need gradients gets those of LSQ (Esser et al. 2019, arXiv:1902.08153).
    """
    steps, zeros = grid.wide(weights.dtype)
    groups = weights.reshape(*grid.scales.shape, -1)
    codes = _Rounded.apply(groups / steps + zeros, *code_range(bits))
    return ((codes - zeros) * steps).view(weights.shape)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, of x's shape and dtype, with the gradient of x."""
    return _Straight.apply(x, rounded)  # type: ignore[no-any-return]


class _Straight(torch.autograd.Function):
    """Not x + (rounded - x), whose sum is rounded too."""

    @staticmethod
    def forward(context: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


class _Rounded(torch.autograd.Function):
    """clamp(round(x), low, high) with slope one between low and high."""

    @staticmethod
    def forward(context: Any, x: Tensor, low: int, high: int) -> Tensor:
        free = x.round()
        codes = free.clamp(low, high)
        context.save_for_backward(free == codes)
        return codes

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = context.saved_tensors
        return slope * inside, None, None
