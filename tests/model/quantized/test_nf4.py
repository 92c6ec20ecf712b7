"""NF4 linears against a dense layer of the same weights: stacks of modules, tiles, rows, and moves between dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import ArtifactError
from hone.model.quantized import dequantizing
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.layouts.bitsandbytes_4bit import quantize
from hone.model.quantized.nf4 import NF4
from hone.model.quantized.scheme import Scheme

SCHEMES = {name: Scheme(4, 64, name, number=name[:3]) for name in ("nf4", "nf4-nested", "fp4-nested")}
COLUMNS = 128


def parts_of(scheme: Scheme, rows: list[int]) -> tuple[list[dict], torch.Tensor]:
    """Checkpoint modules of random weights, and the weights [N, K] that they stand for."""
    generator = torch.Generator().manual_seed(0)
    stored = [
        quantize(torch.randn(count, COLUMNS, generator=generator) * (1 + count), scheme, torch.float32)
        for count in rows
    ]
    parts = [layout_of(scheme).write(one) for one in stored]
    for part, count in zip(parts, rows, strict=True):
        part["bias"] = torch.randn(count, generator=generator)
    return parts, torch.cat([one.weight(torch.float32) for one in stored])


def module_of(scheme: Scheme, parts: list[dict], rows: list[int]) -> NF4:
    with torch.device("meta"):
        module = NF4(COLUMNS, sum(rows), True, scheme=scheme)
    module.load(parts)
    return module


@pytest.mark.parametrize("rows", [[256, 128, 128], [200, 72, 72], [30]])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("tile", [1 << 20, 5000])
def test_forward_equals_the_dense_layer(name: str, rows: list[int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dequantizing.TILE_VALUES, "cpu", tile)
    parts, weight = parts_of(SCHEMES[name], rows)
    module = module_of(SCHEMES[name], parts, rows)
    assert torch.equal(module.dequantize(torch.float32), weight)
    x = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(1))
    bias = torch.cat([part["bias"] for part in parts])
    torch.testing.assert_close(module(x), F.linear(x, weight, bias), atol=1e-3, rtol=1e-5)
    index = torch.tensor([3, 0, sum(rows) - 1, 3])
    assert torch.equal(module.rows(index, torch.float32), weight[index])
    for before, after, shapes in zip(parts, module.parts(rows), module.part_shapes(rows), strict=True):
        assert before.keys() == after.keys() == shapes.keys()
        assert all(torch.equal(tensor, after[suffix]) for suffix, tensor in before.items())


def test_a_new_dtype_leaves_codes_and_scales_alone() -> None:
    rows = [256, 128]
    parts, weight = parts_of(SCHEMES["nf4-nested"], rows)
    module = module_of(SCHEMES["nf4-nested"], parts, rows).to(torch.bfloat16)
    assert torch.equal(module.dequantize(torch.float32), weight) and module.outer.dtype == torch.float32
    assert module(torch.randn(2, COLUMNS).bfloat16()).dtype == torch.bfloat16
    held = sum(one.nbytes for one in module.buffers())
    assert held == weight.numel() * (4 + 8 / 64) / 8 + 8 * (2 + 1) + 4 * 256 + 2 * sum(rows)  # scales, map, bias


def test_stacked_modules_of_different_maps_are_refused() -> None:
    parts, _ = parts_of(SCHEMES["nf4-nested"], [64, 64])
    parts[1]["weight.nested_quant_map"] = parts[1]["weight.nested_quant_map"] * 2
    with pytest.raises(ArtifactError, match="different nested_quant_map"):
        module_of(SCHEMES["nf4-nested"], parts, [64, 64])
