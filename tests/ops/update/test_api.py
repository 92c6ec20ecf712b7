"""The update's passes in plain torch against the formula, and beside torch's own optimizer."""

from __future__ import annotations

import pytest
import torch

from hone.ops import adamw_step, widen
from hone.ops.update.api import AdamWNumbers
from tests.ops.update.case import assert_steps


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_formulas(grad_dtype: torch.dtype) -> None:
    assert_steps(1000, grad_dtype, torch.bfloat16, "cpu", "reference")


def test_steps_are_those_of_torchs_optimizer() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(50, generator=draw)
    peer = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([peer], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    mean, square = torch.zeros(2, 50)
    for count in range(1, 6):
        grad = torch.randn(50, generator=draw)
        peer.grad = grad.clone()
        optimizer.step()
        adamw_step(weight, grad, mean, square, AdamWNumbers(count, 1e-2, 0.9, 0.95, 1e-8, 0.1))
    torch.testing.assert_close(weight, peer.detach(), rtol=1e-6, atol=1e-6)


def test_a_gradient_is_widened_or_added() -> None:
    source, into = torch.randn(7, 3).bfloat16(), torch.full((7, 3), float("nan"))
    widen(into, source)
    assert torch.equal(into, source.float())
    widen(into, source, add=True)
    assert torch.equal(into, 2 * source.float())


def test_two_gradients_are_added_in_float32() -> None:
    one, other = torch.randn(2, 40).bfloat16()
    into = torch.full((40,), float("nan"))
    widen(into, one, other)
    assert torch.equal(into, one.float() + other.float()) and not torch.equal(into, (one + other).float())
    widen(into, one, other, add=True)
    assert torch.equal(into, one.float() + other.float() + one.float() + other.float())
