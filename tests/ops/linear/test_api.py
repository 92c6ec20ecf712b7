"""The products' references against plain fp64, their checks, their tiled layouts, and the kernels' cuts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.ops import formats, fp8_linear, linear, quantized_linear
from hone.ops.linear.api import fp8_codes
from hone.ops.linear.reference import fp8_values
from hone.ops.linear.shapes import fp8_shape, quantized_shape, skinny_shape


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def codes_and_scales(rows: int, columns: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = formats.code_range(bits)
    codes = torch.randint(low, high + 1, (rows, columns), dtype=torch.int8)
    return codes, torch.randn(rows, columns // group, dtype=torch.float64) * 0.1


def test_linear_is_torchs_on_a_cpu_with_its_gradients() -> None:
    x, weight, bias = torch.randn(2, 3, 8).double(), torch.randn(5, 8).double(), torch.randn(5).double()
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear, leaves)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (130, 192), (7, 128), (128, 320)])
def test_tiles_hold_every_code_where_the_tensor_cores_want_it(bits: int, rows: int, columns: int) -> None:
    codes, _ = codes_and_scales(rows, columns, bits, columns)
    tiled = formats.tile_codes(codes, bits)
    assert tiled.shape == (-(-rows // 128) * 2, columns * bits // 256, 128, 4)
    assert torch.equal(formats.untile_codes(tiled, rows, bits), codes)
    for row, column in torch.stack((torch.randint(rows, (50,)), torch.randint(columns, (50,))), 1).tolist():
        # wgmma, m64k16: thread 32 w + 4 r + c holds rows 16 w + r (+ 8), columns 2 c (+ 1) (+ 8).
        warp, lower, r = row % 64 // 16, row % 16 // 8, row % 8
        far, c, odd = column % 16 // 8, column % 8 // 2, column % 2
        thread = 32 * warp + 4 * r + c
        if bits == 4:
            word = int(tiled[row // 64, column // 64, thread, column % 64 // 16])
            code = (word >> 4 * (2 * far + lower + 4 * odd) & 15) - 8
        else:
            word = int(tiled[row // 64, column // 32, thread, column % 32 // 16 * 2 + far])
            code = (word >> 8 * (2 * lower + odd) & 255) - 128
        assert code == int(codes[row, column])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_scales_come_back(dtype: torch.dtype) -> None:
    scales = torch.randn(150, 3).to(dtype)
    tiled = formats.tile_scales(scales)
    assert tiled.shape == (3, 16, 8, 2) and torch.equal(formats.untile_scales(tiled, 150), scales)
    assert torch.equal(tiled[1, 4, 5], scales[[69, 77], 1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 192])
@pytest.mark.parametrize("tiled", [False, True])
def test_quantized_linear_is_the_product_with_the_weights(bits: int, group: int, tiled: bool) -> None:
    columns = 192 if group in (64, 192) else 256
    codes, scales = codes_and_scales(70, columns, bits, group if columns % group == 0 else columns)
    weight = formats.dequantize(codes, scales, torch.float64)
    x, bias = torch.randn(2, 3, columns).double().requires_grad_(), torch.randn(70).double()
    expected = F.linear(x, weight, bias)
    if tiled:
        codes, scales = formats.tile_codes(codes, bits), formats.tile_scales(scales)
    got = quantized_linear(x, codes, scales, bias, bits=bits, out_features=70)
    torch.testing.assert_close(got, expected)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_quantized_linear_rounds_weights_as_the_checkpoint_says() -> None:
    codes, scales = codes_and_scales(16, 64, 4, 32)
    x = torch.randn(3, 64).bfloat16()
    expected = F.linear(x, formats.dequantize(codes, scales.bfloat16(), torch.bfloat16))
    assert torch.equal(quantized_linear(x, codes, scales.bfloat16(), backend="reference"), expected)


@pytest.mark.parametrize("kind", ["row", "1x128", "128x128"])
def test_fp8_codes_keep_three_bits(kind: str) -> None:
    x = torch.randn(200, 256).double() * torch.logspace(-3, 3, 200).double().unsqueeze(1)
    x[5] = 0
    codes, scales = fp8_codes(x, kind)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and bool((scales > 0).all())
    assert scales.shape == {"row": (200,), "1x128": (200, 2), "128x128": (2, 2)}[kind]
    values = fp8_values(codes, scales, torch.float64)
    assert bool((values[5] == 0).all())
    if kind != "128x128":  # a square of 128 rows of different sizes loses the small ones
        spread = x.abs().amax(1, keepdim=True)
        assert bool(((values - x).abs() <= 2.0**-4 * 1.01 * (x.abs() + spread * 2.0**-12)).all())


@pytest.mark.parametrize("blockwise", [False, True])
def test_fp8_linear_is_the_product_of_its_values(blockwise: bool) -> None:
    x, x_scales = fp8_codes(torch.randn(5, 256), "1x128" if blockwise else "row")
    weight, weight_scales = fp8_codes(torch.randn(150, 256), "128x128" if blockwise else "row")
    bias = torch.randn(150)
    expected = fp8_values(x, x_scales, torch.float64) @ fp8_values(weight, weight_scales, torch.float64).T + bias
    got = fp8_linear(x, x_scales, weight, weight_scales, bias, dtype=torch.float64)
    torch.testing.assert_close(got, expected)
    half = fp8_linear(x, x_scales, weight, weight_scales, bias)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=2**-7, atol=1e-3)


def wrong_calls():
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    codes, scales = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 2)
    tiled, tiled_scales = formats.tile_codes(codes, 4), formats.tile_scales(scales)
    fp8, ones = torch.zeros(8, 64, dtype=torch.float8_e4m3fn), torch.ones(8)
    yield "columns", lambda: linear(x[:, :32], weight)
    yield "bias", lambda: linear(x, weight, torch.ones(7))
    yield "codes are", lambda: quantized_linear(x, weight, scales)
    yield "scales", lambda: quantized_linear(x, codes, scales[:7])
    yield "3 scales", lambda: quantized_linear(x, codes, torch.ones(8, 3))
    yield "columns", lambda: quantized_linear(x[:, :32], codes, scales)
    yield "of 8 bits|not tiles|columns", lambda: quantized_linear(x, tiled, tiled_scales, bits=8, out_features=8)
    yield "not tiles", lambda: quantized_linear(x, tiled, tiled_scales, out_features=500)
    yield "bias", lambda: quantized_linear(x, codes, scales, torch.ones(3))
    yield "x_scales", lambda: fp8_linear(fp8, ones[:3], fp8, ones)
    yield "weight_scales", lambda: fp8_linear(fp8, ones, fp8, ones.double())
    yield "blocks", lambda: fp8_linear(fp8, torch.ones(8, 1), fp8, ones)
    yield "both must be", lambda: fp8_linear(x, ones, fp8, ones)
    yield "columns", lambda: fp8_codes(x, "1x128")
    yield "kind is 'col'", lambda: fp8_codes(x, "col")
    yield "columns", lambda: fp8_codes(x[:, :0])
    yield "0 scales", lambda: quantized_linear(x, codes, scales[:, :0])


@pytest.mark.parametrize("case", range(17))
def test_a_wrong_call_is_named(case: int) -> None:
    match, call = list(wrong_calls())[case]
    with pytest.raises(SpecError, match=match):
        call()


ROWS = [1, 2, 7, 8, 9, 16, 17, 33, 64]
SIZES = [(14336, 4096), (4096, 14336), (28672, 8192), (1024, 4096), (8, 64), (130, 192), (128256, 4096)]


@pytest.mark.parametrize(("features", "columns"), SIZES)
def test_cuts_cover_the_problem_and_fit_the_machine(features: int, columns: int) -> None:
    for rows in ROWS:
        shape = skinny_shape(rows, features, columns)
        assert rows <= shape.block_m <= 64 and 1 <= shape.parts <= 16
        stage = (shape.block_n + shape.block_m) * shape.block_k * 2
        assert stage * shape.stages <= 227 << 10
    for rows in [*ROWS, 65, 256, 1000, 8192]:
        for bits in (4, 8):
            for group in (0, 32, 64, 128, 1024):
                shape = quantized_shape(rows, features, columns, bits, group)
                assert shape.block_m in (8, 16, 32, 64, 128, 256) and (shape.block_m >= rows or shape.block_m >= 64)
                assert not (shape.fold and group in (0, 32)), "only whole chunks can be scaled as sums"
                scales = max(1, 64 * shape.chunks // group) * 128 if group else 0
                chunk = shape.block_m * 128 + shape.tiles * 512 * bits
                used = shape.stages * (shape.chunks * chunk + scales * shape.tiles) + 1024
                assert used * shape.blocks <= 227 << 10, shape
                # float32 sums of 64 rows by block_m columns in 128 threads, a dequantized chunk, and what else is live
                budget = 65536 // (128 * (shape.tiles + 1) * shape.blocks)
                wanted = shape.block_m // 2 * (2 if shape.fold else 1) + 16 + 40
                assert wanted <= budget * (shape.tiles + 1) / shape.tiles, shape
        for blockwise in (False, True):
            cut = fp8_shape(rows, features, columns, blockwise=blockwise)
            assert 128 % cut.block_n == 0 and (cut.block_n + cut.block_m) * 128 * cut.stages <= 227 << 10


def test_a_cut_does_not_depend_on_the_rows_of_one_size() -> None:
    """Batches whose rows share a tile get the same cut: a row's result does not change with its neighbours."""
    for features, columns in SIZES:
        assert len({skinny_shape(rows, features, columns) for rows in range(1, 17)}) == 1
        assert len({quantized_shape(rows, features, columns, 4, 128) for rows in range(9, 17)}) == 1
