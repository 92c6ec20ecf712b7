"""Linears that hold their weights as they are: products, and the tensors of a checkpoint in and out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hone.model.linear import Dense, Experts

ROWS = [3, 5]


def filled(linear: nn.Module) -> nn.Module:
    """`linear` in float64 with random weights and biases."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in linear.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return linear


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_dense_is_a_product_with_the_weight_as_it_is(bias: bool) -> None:
    linear, x = filled(Dense(4, 8, bias)), torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.einsum("bsi,oi->bso", x, linear.weight)
    torch.testing.assert_close(linear(x), expected + linear.bias if bias else expected)
    assert torch.equal(linear.dequantize(torch.float32), linear.weight.float())


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_experts_multiply_the_rows_up_to_their_end(bias: bool) -> None:
    linear, x = filled(Experts(4, 8, bias, experts=3)), torch.randn(7, 4, dtype=torch.float64)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)  # the second expert has no rows
    owner = [0, 0, 2, 2, 2, 2, 2]
    expected = torch.stack([linear.weight[expert] @ row for expert, row in zip(owner, x)])
    torch.testing.assert_close(linear(x, ends), expected + linear.bias[owner] if bias else expected)


@pytest.mark.parametrize("make", [Dense, lambda *sizes: Experts(*sizes, experts=2)], ids=["dense", "experts"])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_those_of_a_checkpoint_and_load_again(make, bias: bool) -> None:
    linear = filled(make(4, 8, bias))
    rows = ROWS * (2 if linear.weight.dim() == 3 else 1)
    parts = linear.parts(rows)
    assert [{name: tuple(one.shape) for name, one in part.items()} for part in parts] == linear.part_shapes(rows)
    with torch.device("meta"):
        again = make(4, 8, bias)
    again.load(parts)
    assert same(linear.state_dict(), again.state_dict())
    assert torch.equal(torch.cat([part["weight"] for part in parts]), linear.weight.flatten(0, -2))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
