"""Frozen linears with and without LoRA factors: gradients against autograd in float64, and what is kept for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import frozen_linear, lora_linear, swiglu
from hone.ops.activation.api import swiglu_gradient
from hone.ops.activation.reference import swiglu as formula

COLUMNS, ROWS = 12, 20
PIECES = {"whole": [(0, 20, 3)], "stacked": [(0, 8, 3), (8, 6, 2), (14, 6, 3)], "some": [(8, 6, 4)]}
"""(first row, rows, rank) of each wrapped piece."""


def leaves(name: str, gated: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x, every A and every B."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    pieces = PIECES[name]
    x = drawn(2, 5, COLUMNS * (2 if gated else 1))
    return x, [drawn(rank, COLUMNS) for *_, rank in pieces], [drawn(rows, rank) for _, rows, rank in pieces]


WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BIAS = torch.randn(ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def ours(x: Tensor, downs: list[Tensor], ups: list[Tensor], name: str, gated: bool) -> Tensor:
    begins = [begin for begin, *_ in PIECES[name]]
    weight, bias = lambda dtype: WEIGHT.to(dtype), BIAS.to(x.dtype)
    return lora_linear(x, weight, bias, downs, ups, scale=1.7, begins=begins, gated=gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_gradients_are_those_of_autograd(name: str, gated: bool) -> None:
    x, downs, ups = leaves(name, gated)
    inputs = formula(x) if gated else x
    added = torch.zeros(2, 5, ROWS, dtype=torch.float64)
    pieces = []
    for (begin, rows, _), down, up in zip(PIECES[name], downs, ups, strict=True):
        pieces.append(F.pad(inputs @ down.T @ up.T * 1.7, (begin, ROWS - begin - rows)))
    plain = F.linear(inputs, WEIGHT, BIAS) + torch.stack([added, *pieces]).sum(0)
    found = ours(x, downs, ups, name, gated)
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=1e-12)
    flow = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    asked = [x, *downs, *ups]
    for mine, theirs in zip(
        torch.autograd.grad(found, asked, flow), torch.autograd.grad(plain, asked, flow), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def test_numerical_differences_agree() -> None:
    x, downs, ups = leaves("stacked", True)
    inputs = [one.detach()[:1, :2].requires_grad_() if one is x else one for one in (x, *downs, *ups)]
    assert torch.autograd.gradcheck(lambda x, *rest: ours(x, list(rest[:3]), list(rest[3:]), "stacked", True), inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_only_the_input_and_the_factors_are_kept(gated: bool) -> None:
    x, downs, ups = leaves("stacked", gated, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        ours(x, downs, ups, "stacked", gated)
    assert {one.data_ptr() for one in kept} == {one.data_ptr() for one in (x, *downs, *ups)}


def test_a_frozen_product_keeps_nothing_and_asks_for_its_weight_twice() -> None:
    asked, kept = [], []
    x = torch.randn(3, 4, COLUMNS, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def weight(dtype: torch.dtype) -> Tensor:
        asked.append(dtype)
        return WEIGHT.to(dtype)

    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        found = frozen_linear(x, weight, BIAS.float())
    assert asked == [torch.float32] and not kept
    torch.testing.assert_close(found, F.linear(x, WEIGHT.float(), BIAS.float()))
    (grad,) = torch.autograd.grad(found, x, torch.ones_like(found))
    torch.testing.assert_close(grad, WEIGHT.float().sum(0).expand_as(x))
    assert len(asked) == 2


def test_no_gradient_goes_to_inputs_that_need_none() -> None:
    x, downs, ups = leaves("stacked", False)
    ours(x.detach(), downs, ups, "stacked", False).sum().backward()
    assert all(one.grad is not None for one in (*downs, *ups)) and x.grad is None


def test_a_graph_gets_the_formula() -> None:
    x, downs, ups = leaves("stacked", True, torch.float32)
    compiled = torch.compile(lambda x, *rest: ours(x, list(rest[:3]), list(rest[3:]), "stacked", True), backend="eager")
    torch.testing.assert_close(compiled(x, *downs, *ups), ours(x, downs, ups, "stacked", True))


def test_the_gate_s_gradient() -> None:
    gate_up = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    flow = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (plain,) = torch.autograd.grad(swiglu(gate_up), gate_up, flow)
    torch.testing.assert_close(swiglu_gradient(gate_up.detach(), flow), plain)


def test_factors_that_do_not_fit_are_named() -> None:
    x, downs, ups = leaves("whole", False)
    with pytest.raises(SpecError, match=r"A \(3, 12\) and B \(20, 3\) of 6 input features"):
        lora_linear(x, WEIGHT.to, None, downs, ups, scale=1.0, gated=True)
    with pytest.raises(SpecError, match=r"1 pieces begin at \[0, 4\]"):
        lora_linear(x, WEIGHT.to, None, downs, ups, scale=1.0, begins=(0, 4))
