"""Experts with fp8 products against their definition in float64: the three products of each expert's rows, held codes, graphs, misuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.fp8.experts import EXPERT_RECIPES, fp8_grouped_linear
from hone.ops.fp8.factors import weight_codes
from hone.ops.fp8.recipes import RECIPES
from tests.ops.fp8.test_api import E4M3, defined

E, N, K = 4, 48, 64
SIZES = (13, 0, 24, 4)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, K], weight [E, N, K], ends [E] and the gradient of the output [T, N], with rows of very different sizes."""
    draw = torch.Generator().manual_seed(seed)

    def uneven(*shape: int) -> Tensor:
        sizes = torch.exp2(torch.randint(-12, 6, (*shape[:-1], 1), generator=draw) / 2.0)
        return (torch.randn(shape, generator=draw) * sizes).bfloat16()

    ends = torch.tensor(SIZES).cumsum(0).int()
    return uneven(sum(SIZES), K), uneven(E, N, K), ends, uneven(sum(SIZES), N) * 1e-3


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("recipe", EXPERT_RECIPES)
def test_products_are_those_of_the_definition(recipe: str, held: bool) -> None:
    x, weight, ends, upstream = inputs()
    codes = weight_codes(weight, recipe) if held else None
    x.requires_grad_()
    weight.requires_grad_()
    y = fp8_grouped_linear(x, weight, ends, recipe=recipe, held=codes)
    y.backward(upstream)
    by_row = defined(x.detach(), E4M3, 1).split(SIZES)
    flow, flow_t = defined(upstream, E4M3, 1).split(SIZES), defined(upstream, E4M3, 0).split(SIZES)
    x_t = defined(x.detach(), E4M3, 0).split(SIZES)
    if not RECIPES[recipe].weight_gradient:
        flow_t, x_t = upstream.double().split(SIZES), x.detach().double().split(SIZES)
    wanted, by_x, by_weight = [], [], []
    for expert, own in enumerate(weight.detach()):
        wanted.append(by_row[expert] @ defined(own, E4M3, 1).T)
        by_x.append(flow[expert] @ defined(own, E4M3, 0))
        by_weight.append(flow_t[expert].T @ x_t[expert])
    for found, exact in ((y, torch.cat(wanted)), (x.grad, torch.cat(by_x)), (weight.grad, torch.stack(by_weight))):
        assert found is not None and found.dtype == torch.bfloat16
        size = exact.abs().amax(-1, keepdim=True)
        assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6 * size + 1e-30).all()
    assert not weight.grad[1].any()


def test_no_rows_at_all() -> None:
    """As a rank of expert parallelism may have."""
    _, weight, ends, _ = inputs()
    x = torch.zeros(0, K, dtype=torch.bfloat16, requires_grad=True)
    weight.requires_grad_()
    y = fp8_grouped_linear(x, weight, torch.zeros_like(ends))
    y.sum().backward()
    assert y.shape == (0, N) and x.grad.shape == (0, K) and not weight.grad.any()


def test_a_graph_gives_the_bits_of_the_eager_call() -> None:
    def run(call):
        x, weight, ends, upstream = inputs(1)
        x.requires_grad_()
        weight.requires_grad_()
        y = call(x, weight, ends)
        y.backward(upstream)
        return [y.detach(), x.grad, weight.grad]

    def layer(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return fp8_grouped_linear(x * 1.0, weight, ends) * 1.0

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(one, other) for one, other in zip(run(layer), run(compiled), strict=True))


def test_misuse_is_named() -> None:
    x, weight, ends, _ = inputs()
    with pytest.raises(SpecError, match="47 output and 64 input"):
        fp8_grouped_linear(x, weight[:, :47], ends)
    with pytest.raises(SpecError, match="do not fit"):
        fp8_grouped_linear(x[:, :16], weight, ends)
    with pytest.raises(SpecError, match="recipe is 'blockwise'") as error:
        fp8_grouped_linear(x, weight, ends, recipe="blockwise")
    assert "rowwise_with_gw_hp" in error.value.fix
