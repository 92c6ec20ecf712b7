"""A linear with fp8 products against its definition in float64: codes, scales, the three products, held codes, compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import fp8_trained_linear
from hone.ops.fp8 import reference
from hone.ops.fp8.factors import weight_codes
from hone.ops.fp8.recipes import RECIPES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
M, N, K = 32, 48, 64


def grid_of(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a format, in order, from its bits."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def defined(x: Tensor, dtype: torch.dtype, axis: int | None) -> Tensor:
    """x as the definition has it, float64: by the least power of two into the range, to the nearest number, and back."""
    x = x.double()
    largest = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST[dtype])).clamp(min=-126))
    grid = grid_of(dtype)
    steps = x / scale
    assert steps.abs().max() <= LARGEST[dtype]
    above = torch.searchsorted(grid, steps.contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    # Half to even: of two neighbours the one with the even last bit.
    even = torch.tensor([int(one) % 2 == 0 for one in grid.to(dtype).view(torch.uint8)])[above - 1]
    return torch.where((steps < middle) | ((steps == middle) & even), low, high) * scale


def inputs(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and the gradient of the output, with rows and columns of very different sizes."""
    draw = torch.Generator().manual_seed(seed)

    def uneven(rows: int, columns: int) -> Tensor:
        sizes = torch.exp2(torch.randint(-12, 6, (rows, 1), generator=draw) / 2.0)
        across = torch.exp2(torch.randint(-6, 6, (1, columns), generator=draw) / 2.0)
        return (torch.randn(rows, columns, generator=draw) * sizes * across).to(dtype)

    x, weight, upstream = uneven(M, K), uneven(N, K), uneven(M, N) * 1e-3
    return x, weight, torch.randn(N, generator=draw).to(dtype), upstream


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_codes_are_the_nearest_numbers_after_the_least_power_of_two(dtype, axis):
    for seed in range(3):
        x = inputs(seed, torch.float32)[0]
        x[3], x[:, 5] = 0.0, 0.0
        x[7, 9] = 1.75 * 2.0**4  # just in range, and just beyond it
        x[8, 10] = 1.7500001 * 2.0**4
        columns = axis == 0
        largest = reference.maxima(x, axis is None)[columns]
        codes, scales = reference.codes_of(x, largest, dtype, columns=columns)
        assert codes.dtype == dtype and codes.is_contiguous()
        found = codes.double() * scales.double()[:, None]
        wanted = defined(x.where(x.abs() > 0, 1e-30), dtype, axis)
        wanted = torch.where(x.double() == 0, 0.0, wanted)
        assert torch.equal(found.t() if columns else found, wanted)


def test_what_is_not_finite_is_seen():
    x = torch.randn(16, 16)
    x[3, 4], x[5, 6] = float("inf"), float("nan")
    codes, scales = reference.codes_of(x, reference.maxima(x, False)[0], E4M3, columns=False)
    bad = (codes.float() * scales[:, None]).isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("recipe", [name for name, how in RECIPES.items() if not how.blockwise])
def test_products_are_those_of_the_definition(recipe, held):
    x, weight, bias, upstream = inputs()
    how = RECIPES[recipe]
    gradient = getattr(torch, how.gradient)
    codes = weight_codes(weight, recipe) if held else None
    for part in (x, weight, bias):
        part.requires_grad_()
    y = fp8_trained_linear(x.view(2, M // 2, K), weight, bias, recipe=recipe, held=codes)
    y.backward(upstream.view(2, M // 2, N))

    def of(part: Tensor, dtype: torch.dtype, axis: int) -> Tensor:
        return defined(part.detach(), dtype, None if how.tensorwise else axis)

    wanted = of(x, E4M3, 1) @ of(weight, E4M3, 1).t() + bias.detach().double()
    by_x = of(upstream, gradient, 1) @ of(weight, E4M3, 0)
    by_weight = of(upstream, gradient, 0).t() @ of(x, E4M3, 0)
    if not how.weight_gradient:
        by_weight = upstream.double().t() @ x.detach().double()
    for found, exact in ((y.view(M, N), wanted), (x.grad, by_x), (weight.grad, by_weight)):
        assert found.dtype == torch.bfloat16
        # Rounded once, from float32 sums of numbers that may cancel.
        size = exact.abs().amax(1, keepdim=True)
        assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6 * size + 1e-30).all()
    torch.testing.assert_close(bias.grad.float(), upstream.float().sum(0), rtol=1e-2, atol=1e-4)


def test_rows_scales_keep_small_rows_and_one_scale_loses_them():
    """Why rowwise is the default: beside a row 2^20 times as large a small row is zero under one scale."""
    x, weight = torch.randn(16, K).bfloat16(), torch.randn(N, K).bfloat16()
    x[0] *= 2.0**20
    exact = x.float() @ weight.float().t()
    errors = {}
    for recipe in ("rowwise", "tensorwise"):
        found = fp8_trained_linear(x, weight, recipe=recipe).float()
        errors[recipe] = ((found - exact)[1:].norm() / exact[1:].norm()).item()
    assert errors["rowwise"] < 0.06 and errors["tensorwise"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_gives_the_bits_of_the_eager_call(recipe):
    def run(call):
        x, weight, bias, upstream = inputs(1)
        for part in (x, weight, bias):
            part.requires_grad_()
        y = call(x, weight, bias)
        y.backward(upstream)
        return [y.detach(), x.grad, weight.grad, bias.grad]

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fp8_trained_linear(x * 1.0, weight, bias, recipe=recipe) * 1.0

    plain = run(layer)
    compiled = run(torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))


def test_the_op_is_one_that_torch_can_trace():
    x, weight, bias, _ = inputs()
    for part in (x, weight, bias):
        part.requires_grad_()
    for recipe in RECIPES:
        given = (x, weight, bias, None, None, None, None, recipe)
        tests = ("test_faketensor", "test_autograd_registration")  # that of the schema cannot compare fp8 tensors
        torch.library.opcheck(torch.ops.hone.fp8_trained_linear.default, given, test_utils=tests)


def test_misuse_is_named():
    x, weight, _, _ = inputs()
    with pytest.raises(SpecError, match="multiples of 16, and this one has 31 rows"):
        fp8_trained_linear(x[:31], weight)
    with pytest.raises(SpecError, match="47 output and 64 input"):
        fp8_trained_linear(x, weight[:47])
    with pytest.raises(SpecError, match="differ in columns"):
        fp8_trained_linear(x[:, :16], weight)
    with pytest.raises(SpecError, match="recipe is 'rows'") as error:
        fp8_trained_linear(x, weight, recipe="rows")
    assert "rowwise_with_gw_hp" in error.value.fix
