"""Rounding that gradients pass: its values are those that are stored, its gradients those of the papers."""

from __future__ import annotations

import pytest
import torch

from hone.model.quantized.scheme import Scheme
from hone.ops.rounding.integer_grid import Grid, find_grid
from hone.ops.rounding.straight_through import fake_quantize


def weights_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_are_those_of_the_stored_weight(bits: int, symmetric: bool) -> None:
    weights = weights_of(bits)
    grid = find_grid(weights, bits, 16, "search", torch.float32, symmetric=symmetric)
    stored = Scheme(bits, 16, symmetric=symmetric).quantize(weights, *grid)
    assert torch.equal(fake_quantize(weights, grid, bits), stored.weight(torch.float64))


def test_gradients_pass_where_nothing_is_clamped() -> None:
    weights = torch.tensor([[-9.0, -8.4, -3.2, 0.1, 6.9, 7.4, 7.6, 30.0]], dtype=torch.float64, requires_grad=True)
    slopes = torch.arange(1.0, 9.0, dtype=torch.float64)
    fake_quantize(weights, Grid(torch.ones(1, 1)), 4).backward(slopes[None])
    assert weights.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]]


def test_gradients_of_scales_are_those_of_lsq() -> None:
    weights, scales = weights_of(), torch.full((6, 2), 0.2, dtype=torch.float64, requires_grad=True)
    fake_quantize(weights, Grid(scales), 3).sum().backward()
    steps = weights.view(6, 2, 16) / 0.2
    inside = (steps.round() >= -4) & (steps.round() <= 3)
    lsq = torch.where(inside, steps.round() - steps, steps.round().clamp(-4, 3))
    assert bool((~inside).any()) and torch.allclose(scales.grad, lsq.sum(-1), rtol=0, atol=1e-12)
