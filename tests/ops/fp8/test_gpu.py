"""The casts on a GPU against their reference, bit for bit in poisoned memory, and the linear against its form on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import fp8_trained_linear
from hone.ops.fp8 import blocks, factors, reference, triton_blocks, triton_kernels
from hone.ops.fp8.experts import EXPERT_RECIPES, fp8_grouped_linear
from hone.ops.fp8.recipes import RECIPES
from tests.ops.gpu_case import error, poison

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


def uneven(rows: int, columns: int, seed: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw, device="cuda")
    x *= torch.exp2(torch.randint(-6, 6, (rows, 1), generator=draw, device="cuda").float())
    return x * torch.exp2(torch.randint(-3, 3, (1, columns), generator=draw, device="cuda").float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (144, 4112), (1040, 208), (2048, 4096)])
def test_codes_are_those_of_the_reference(dtype, tensorwise, shape):
    x = uneven(*shape, seed=sum(shape)).to(dtype)
    wanted = reference.maxima(x.cpu(), tensorwise)
    poison()
    largest = triton_kernels.maxima(x, tensorwise)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(largest, wanted, strict=True))
    for code in (torch.float8_e4m3fn, torch.float8_e5m2):
        poison()
        made = triton_kernels.cast(x, largest, code, tensorwise, rows=True, columns=True)
        for turned in (False, True):
            codes, scales = reference.codes_of(x.cpu(), wanted[turned], code, columns=turned)
            assert torch.equal(made[2 * turned].cpu().view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(made[2 * turned + 1].cpu(), scales)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_is_that_of_a_cpu(recipe):
    given = [uneven(256, 384, 1), uneven(512, 384, 2), torch.randn(512, device="cuda")]
    flow = uneven(256, 512, 3).bfloat16()

    def run(device: str) -> list[Tensor]:
        leaves = [one.bfloat16().to(device).requires_grad_() for one in given]
        y = fp8_trained_linear(*leaves, recipe=recipe)
        y.backward(flow.to(device))
        return [y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    first, second, exact = run("cuda"), run("cuda"), run("cpu")
    for one, two, wanted in zip(first, second, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, wanted) < 1e-2


@pytest.mark.parametrize("recipe", EXPERT_RECIPES)
@pytest.mark.parametrize(
    ("sizes", "out", "width"),
    [((100, 0, 128, 283), 128, 64), ((1, 63, 64, 65, 0), 272, 208), ((0, 0, 700), 1408, 2048), ((40,) * 200, 144, 80)],
)
def test_experts_are_those_of_a_cpu(recipe, sizes, out, width):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    ends = torch.tensor(sizes).cumsum(0).int()
    given = [uneven(sum(sizes), width, 1), torch.stack([uneven(out, width, 2 + one) for one in range(len(sizes))])]
    flow = uneven(sum(sizes), out, 3).bfloat16()

    def run(device: str) -> list[Tensor]:
        leaves = [one.bfloat16().to(device).requires_grad_() for one in given]
        poison()
        y = fp8_grouped_linear(*leaves, ends.to(device), recipe=recipe)
        y.backward(flow.to(device))
        return [y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    first, second, exact = run("cuda"), run("cuda"), run("cpu")
    for one, two, wanted in zip(first, second, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, wanted) < 1e-2


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (144, 4112), (1040, 208)])
def test_codes_in_blocks_are_those_of_the_reference(square, shape):
    x = uneven(*shape, seed=sum(shape)).bfloat16()
    poison()
    made = triton_blocks.cast(x, E4M3, square=square, rows=True, columns=True)
    for turned in (False, True):
        codes, scales = blocks.block_codes(x.cpu(), E4M3, square=square, columns=turned)
        assert torch.equal(made[2 * turned].cpu().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made[2 * turned + 1].cpu(), scales)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("sizes", [(144, 208, 272), (256, 384, 1024)])
def test_products_in_blocks_are_those_of_float64(square, sizes):
    """Row by row, so that small ones count; all tiles have the same bits, and cuBLAS's product is as near where it is chosen."""
    rows, features, width = sizes
    a = triton_blocks.cast(uneven(rows, width, 1), E4M3, square=False, rows=True, columns=False)[:2]
    b = triton_blocks.cast(uneven(features, width, 2), E4M3, square=square, rows=True, columns=False)[:2]
    exact = blocks.block_product(*a, *b, None, torch.float64, square=square, sums=torch.float64)
    which, how = 0 if square else 2, RECIPES["blockwise"]

    def away(found: Tensor) -> float:
        return ((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max().item()

    found = []
    for tile in triton_blocks.TILES:
        poison()
        found.append(triton_blocks.product(*a, *b, None, torch.float32, square=square, tile=tile))
    assert all(torch.equal(found[0], one) for one in found) and away(found[0]) < 1e-2
    poison()
    assert away(factors.product(*a, *b, None, torch.bfloat16, how, which)) < 2e-2
