"""Blocks of 128 against their definition in float64: codes, scales, the three products, sums, and what a part of a tensor has."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hone.ops import fp8_trained_linear
from hone.ops.dispatch import Where, choose
from hone.ops.fp8 import blocks
from hone.ops.fp8.factors import E4M3, cast, maxima, weight_codes
from hone.ops.fp8.recipes import RECIPES
from tests.ops.fp8.test_api import defined

M, N, K = 144, 272, 400
"""No multiples of 128, so that every axis ends with a smaller block."""


def uneven(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers whose blocks differ in size by up to 2^9."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 4, (rows, 1), generator=draw).float())
    across = torch.exp2(torch.randint(-4, 5, (1, columns), generator=draw) / 2.0)
    return (torch.randn(rows, columns, generator=draw) * sizes * across).to(dtype)


def by_tile(x: Tensor, high: int) -> Tensor:
    """x [M, K] as its tiles of `high` x 128 have it, one after another, in float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for left in range(0, x.shape[1], 128):
        for top in range(0, len(x), high if high > 1 else len(x)):
            here = slice(top, top + high if high > 1 else None), slice(left, left + 128)
            out[here] = defined(x[here], E4M3, None if high > 1 else 1)
    return out


def test_codes_and_scales_are_those_of_each_tile():
    x = uneven(M, K, 0, torch.float32)
    for square, high in ((False, 1), (True, 128)):
        for columns in (False, True):
            codes, scales = blocks.block_codes(x, E4M3, square=square, columns=columns)
            found = x.t() if columns else x
            assert codes.shape == found.shape and codes.is_contiguous() and scales.is_contiguous()
            assert scales.shape == blocks.scales_shape(*found.shape, square=square)
            wanted = by_tile(found, high)
            assert torch.equal(blocks.decoded(codes, scales, square=square, dtype=torch.float64), wanted)
            assert torch.equal(
                blocks.decoded(codes, scales, square=square).double(), wanted
            )  # float32 has them exactly


def test_a_weight_has_the_same_codes_in_both_directions():
    """Its blocks are squares and its scales powers of two: what the input's gradient reads is the transpose, rounded once."""
    found = weight_codes(uneven(N, K, 1), "blockwise")
    assert torch.equal(found.codes.t().float(), found.codes_t.float())
    assert torch.equal(found.scales.t(), found.scales_t)


def test_a_number_that_is_not_finite_spoils_its_tile_alone():
    x = torch.randn(M, K)
    x[3, 130], x[5, 399] = float("inf"), float("nan")
    codes, scales = blocks.block_codes(x, E4M3, square=False, columns=False)
    bad = blocks.decoded(codes, scales, square=False).isnan()
    wanted = torch.zeros(M, K, dtype=torch.bool)
    wanted[3, 128:256] = wanted[5, 384:] = True
    assert torch.equal(bad, wanted)


@pytest.mark.parametrize("held", [False, True])
def test_products_are_those_of_the_definition(held):
    x, weight, upstream = uneven(M, K, 2), uneven(N, K, 3), uneven(M, N, 4) * 1e-3
    bias = torch.randn(N).bfloat16()
    codes = weight_codes(weight, "blockwise") if held else None
    for part in (x, weight, bias):
        part.requires_grad_()
    y = fp8_trained_linear(x.view(2, M // 2, K), weight, bias, recipe="blockwise", held=codes)
    y.backward(upstream.view(2, M // 2, N))
    wide = by_tile(weight.detach(), 128)
    wanted = by_tile(x.detach(), 1) @ wide.t() + bias.detach().double()
    by_x = by_tile(upstream, 1) @ wide
    by_weight = by_tile(upstream.t(), 1) @ by_tile(x.detach().t(), 1).t()
    for found, exact in ((y.view(M, N), wanted), (x.grad, by_x), (weight.grad, by_weight)):
        assert found.dtype == torch.bfloat16
        size = exact.abs().amax(1, keepdim=True)
        assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6 * size + 1e-30).all()


def test_the_reference_sums_in_float64_too():
    a, b = (
        blocks.block_codes(uneven(M, K, 5), E4M3, square=False, columns=False),
        weight_codes(uneven(N, K, 6), "blockwise"),
    )
    given = (*a, b.codes, b.scales, None)
    exact = blocks.block_product(*given, torch.float64, square=True, sums=torch.float64)
    near = blocks.block_product(*given, torch.float32, square=True)
    off = (near.double() - exact).abs().amax() / exact.abs().amax()
    assert exact.dtype == torch.float64 and 0 < off < 1e-5


def test_an_outlier_costs_its_tile_alone_and_in_a_row_the_row():
    """Why blocks: of a row with one number 2^20 times as large as the others all else is zero under the row's scale, in blocks 128."""
    x, weight = torch.randn(16, 512).bfloat16(), torch.randn(16, 512).bfloat16()
    x[:, 0] = 2.0**20
    weight[:, 0] = 0
    exact = x.float() @ weight.float().t()
    errors = {}
    for recipe in ("rowwise", "blockwise"):
        found = fp8_trained_linear(x, weight, recipe=recipe).float()
        errors[recipe] = ((found - exact).norm() / exact.norm()).item()
    assert errors["rowwise"] == pytest.approx(1.0, abs=0.02)
    assert errors["blockwise"] == pytest.approx(0.5, abs=0.1)  # a quarter of the sum's variance is lost


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_tensor_parallel_part_has_of_the_whole(recipe):
    """Which codes of a part are those of the whole: parts of rows always but with one scale for all, of the summed axis in whole blocks."""
    how, x = RECIPES[recipe], uneven(256, 512, 7)
    x[:, 3] = 2.0**12  # the other half of a row has a smaller scale of its own

    def codes(part: Tensor, *, weight: bool = False) -> tuple[Tensor, ...]:
        made = cast(part, how, E4M3, maxima(part, how), rows=True, columns=True, weight=weight)
        if how.blockwise:
            return tuple(blocks.decoded(made[at], made[at + 1], square=weight) for at in (0, 2))
        return tuple(made[at].float() * made[at + 1][:, None] for at in (0, 2))

    for weight in (False, True):
        whole, whole_t = codes(x, weight=weight)
        rows, _ = codes(x[:128], weight=weight)
        summed, summed_t = codes(x[:, 256:].contiguous(), weight=weight)
        if not how.tensorwise:
            assert torch.equal(rows, whole[:128])
            assert torch.equal(summed_t, whole_t[256:])
        assert torch.equal(summed, whole[:, 256:]) == how.blockwise


def test_products_of_parts_of_the_summed_axis_add_up_to_the_whole():
    """What row-parallel ranks compute: no scale depends on how many there are, only the order of the last sums does."""
    x, weight = uneven(64, 512, 8), uneven(256, 512, 9)

    def part(columns: slice) -> Tensor:
        own = x[:, columns].contiguous(), weight[:, columns].contiguous()
        a = blocks.block_codes(own[0], E4M3, square=False, columns=False)
        b = blocks.block_codes(own[1], E4M3, square=True, columns=False)
        return blocks.block_product(*a, *b, None, torch.float64, square=True, sums=torch.float64)

    whole = part(slice(None))
    for cuts in ((0, 256, 512), (0, 128, 256, 384, 512)):
        total = sum(part(slice(*pair)) for pair in pairwise(cuts))
        torch.testing.assert_close(total, whole, rtol=0, atol=1e-12 * whole.abs().max().item())


LLAMA = {"dtype": torch.bfloat16, "columns": 14336, "width": 4096, "square": True, "library": True}


@pytest.mark.parametrize(
    ("capability", "change", "backend"),
    [
        ((9, 0), {}, "cublas"),
        ((9, 0), {"square": False, "columns": 4096, "width": 8192 + 128}, "cublas"),
        ((9, 0), {"width": 4096 + 128}, "triton"),
        ((9, 0), {"columns": 14336 + 16}, "triton"),
        ((9, 0), {"dtype": torch.float32}, "triton"),
        ((9, 0), {"library": False}, "triton"),
        ((8, 9), {}, "triton"),
        ((10, 0), {}, "triton"),
        ((8, 0), {}, "reference"),
    ],
)
def test_the_chosen_product(capability, change, backend):
    choice = choose("fp8_block_product", Where("cuda", capability, 132, (3, 6)), **LLAMA | change)
    assert choice.backend == backend and choice.reason
    assert choose("fp8_block_product", Where("cpu"), **LLAMA | change).backend == "reference"
