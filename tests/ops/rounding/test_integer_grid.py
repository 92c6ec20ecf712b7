"""Scales: what each way promises, and rounding to the stored dtype."""

from __future__ import annotations

import pytest
import torch

from hone.ops import formats
from hone.ops.rounding.integer_grid import find_scales, stored


def weights_of(rows: int = 16, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(weights: torch.Tensor, scales: torch.Tensor, bits: int, importance: torch.Tensor | float = 1.0) -> float:
    restored = formats.dequantize(formats.quantize(weights, scales, bits), scales, torch.float32)
    return float(((restored - weights).square() * importance).sum())


def test_absmax_is_the_scale_of_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = weights_of().view(16, 2, 32)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    theirs, _ = calculate_qparams(weights.amin(-1), weights.amax(-1), args)
    ours = find_scales(weights.view(16, 64), 4, 32, "absmax", torch.float32)
    assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_signed_scales_represent_the_largest_weight_exactly(bits: int) -> None:
    weights = weights_of()
    scales = find_scales(weights, bits, 32, "signed", torch.float32)
    restored = formats.dequantize(formats.quantize(weights, scales, bits), scales, torch.float32)
    groups, back = weights.view(16, 2, 32), restored.view(16, 2, 32)
    largest = groups.abs().argmax(-1, keepdim=True)
    assert torch.allclose(groups.gather(-1, largest), back.gather(-1, largest), rtol=1e-5)
    assert (scales < 0).any() and (scales > 0).any()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_is_at_least_as_good_as_both(bits: int) -> None:
    weights = weights_of()
    errors = {
        how: error(weights, find_scales(weights, bits, 32, how, torch.float32), bits)
        for how in ("absmax", "signed", "search")
    }
    assert errors["search"] < errors["signed"] < errors["absmax"]


def test_search_heeds_importance() -> None:
    weights = weights_of()
    importance = torch.rand(64, generator=torch.Generator().manual_seed(2)) ** 8
    plain = find_scales(weights, 3, 32, "search", torch.float32)
    weighted = find_scales(weights, 3, 32, "search", torch.float32, importance)
    assert error(weights, weighted, 3, importance) < error(weights, plain, 3, importance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_of_their_stored_dtype_and_never_zero(dtype: torch.dtype) -> None:
    weights = weights_of()
    weights[0] = 0
    weights[1] *= 1e-12
    for how in ("absmax", "signed", "search"):
        scales = find_scales(weights, 4, 32, how, dtype)
        assert scales.dtype == dtype and bool(torch.isfinite(scales).all()) and bool((scales != 0).all())
        assert bool((formats.quantize(weights, scales, 4)[0] == 0).all())


def test_rows_are_chunked_without_changing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from hone.ops.rounding import integer_grid as grid

    weights = weights_of(37, 64)
    whole = find_scales(weights, 4, 16, "search", torch.float16)
    monkeypatch.setitem(grid._CHUNK, "cpu", 200)
    assert torch.equal(find_scales(weights, 4, 16, "search", torch.float16), whole)


def test_stored_clamps_to_what_the_dtype_holds() -> None:
    values = stored(torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30]), torch.float16)
    least, largest = 2.0**-24, torch.finfo(torch.float16).max  # the smallest subnormal number
    assert values.tolist() == [1.0, least, -least, largest, -largest]
