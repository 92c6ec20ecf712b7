"""The skinny and fp8 products in the interpreter: ragged sizes, parts of K, bias, nothing written beside the output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.ops import fp8_linear, input_codes, linear
from hone.ops.linear.api import fp8_codes
from hone.ops.linear.reference import fp8_values
from hone.ops.linear.shapes import Fp8Shape, SkinnyShape
from hone.ops.linear.triton_fp8 import fp8_rows_product
from hone.ops.linear.triton_skinny import skinny_product, sum_parts


@pytest.mark.parametrize(
    ("rows", "features", "columns", "parts"), [(1, 32, 64, 1), (3, 40, 96, 1), (17, 70, 208, 3), (5, 33, 32, 2)]
)
def test_skinny(rows: int, features: int, columns: int, parts: int) -> None:
    x, weight, bias = torch.randn(rows, columns), torch.randn(features, columns), torch.randn(features)
    block_m = 16 if rows <= 16 else 32
    shape = SkinnyShape(32, block_m, 64, warps=4, stages=2, parts=parts, early=False)
    out = skinny_product(x, weight, bias, shape)
    torch.testing.assert_close(out.double(), F.linear(x.double(), weight.double(), bias.double()), rtol=0, atol=1e-4)
    halves = skinny_product(x.half(), weight.half(), None, shape)
    expected = F.linear(x.half().double(), weight.half().double())
    torch.testing.assert_close(halves.double(), expected, rtol=2e-3, atol=2e-2)


def test_strided_inputs_are_read_as_what_they_are() -> None:
    x, weight, bias = torch.randn(64, 3).T, torch.randn(64, 40).T, torch.randn(80)[::2]
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(linear(x, weight, bias, backend="triton").double(), expected, rtol=0, atol=1e-4)
    (x, x_scales), (weight, weight_scales) = fp8_codes(torch.randn(3, 256)), fp8_codes(torch.randn(40, 256))
    lying, own = weight.T.contiguous().T, torch.stack((weight_scales, weight_scales), 1)[:, 0]
    given = (x, x_scales, weight, weight_scales, bias.contiguous())
    expected = fp8_linear(*given, dtype=torch.float32, backend="triton")
    found = fp8_linear(x, x_scales, lying, own, bias, dtype=torch.float32, backend="triton")
    assert torch.equal(found, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(9, 96), torch.randn(40, 96)
    shape = SkinnyShape(32, 16, 32, warps=4, stages=2, parts=2, early=False)
    whole = skinny_product(x, weight, None, shape)
    for row in (0, 4, 8):
        assert torch.equal(skinny_product(x[row : row + 1], weight, None, shape)[0], whole[row])


def test_parts_are_added_in_order() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1).expand(3, 2, 600).contiguous()
    out = sum_parts(parts, torch.ones(600), torch.full((2, 600), float("nan")))
    assert torch.equal(out, ((parts[0] + parts[1]) + parts[2]) + 1)


@pytest.mark.parametrize("kind", ["row", "1x128"])
@pytest.mark.parametrize(("rows", "features", "columns", "parts"), [(3, 40, 256, 1), (18, 130, 384, 2)])
def test_fp8(kind: str, rows: int, features: int, columns: int, parts: int) -> None:
    x, x_scales = fp8_codes(torch.randn(rows, columns), kind)
    weight, weight_scales = fp8_codes(torch.randn(features, columns), "row" if kind == "row" else "128x128")
    bias = torch.randn(features)
    shape = Fp8Shape(32, 16, warps=4, stages=2, parts=parts)
    out = fp8_rows_product(x, x_scales, weight, weight_scales, bias, torch.float32, shape)
    expected = fp8_values(x, x_scales, torch.float64) @ fp8_values(weight, weight_scales, torch.float64).T + bias
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("rows", "features", "columns", "parts"), [(3, 40, 256, 1), (18, 130, 384, 2)])
def test_int8(rows: int, features: int, columns: int, parts: int) -> None:
    """Sums beyond what float16 or 24 bits hold are exact before the scales."""
    x, weight = (torch.randint(-128, 128, (count, columns), dtype=torch.int8) for count in (rows, features))
    x_scales, weight_scales, bias = torch.rand(rows), torch.rand(features), torch.randn(features)
    shape = Fp8Shape(32, 16, warps=4, stages=2, parts=parts)
    out = fp8_rows_product(x, x_scales, weight, weight_scales, bias, torch.float32, shape)
    exact = x.double() @ weight.double().T * x_scales.double()[:, None] * weight_scales.double() + bias
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-2)
    whole = fp8_linear(x, x_scales, weight, weight_scales, bias, dtype=torch.float32)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-6, atol=1e-1)


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_input_codes(group_size: int | None, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 384) * 3).to(dtype)
    x[2] = 0
    for given in (x, x[:, :256], torch.cat((x, x), 1)[:, 384:]):
        ours, plain = (
            input_codes(given, "int8", group_size=group_size, backend=one) for one in ("triton", "reference")
        )
        assert torch.equal(ours[1], plain[1]) and (ours[0].int() - plain[0].int()).abs().max() <= 1
        assert (ours[0] != plain[0]).float().mean() < 0.01
        scales = input_codes(given, "fp8", group_size=group_size, backend="triton")[1]
        assert torch.equal(scales, input_codes(given, "fp8", group_size=group_size)[1])
    fixed = torch.tensor([0.01])
    ours, plain = (input_codes(x, "int8", scale=fixed, backend=one) for one in ("triton", "reference"))
    assert ours[0].min() == -128 and ours[0].max() == 127 and torch.equal(ours[0], plain[0])
    assert ours[1].shape == (5,) and torch.equal(ours[1], plain[1])
