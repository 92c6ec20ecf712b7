"""Rows of a quantized matrix in every order in which codes are kept: those of the whole matrix, and no others are read."""

from __future__ import annotations

import pytest
import torch

from hone.model.quantized import packed_int
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Scheme
from tests.model.quantized.test_quantized import make_module, make_parts

INDEX = torch.tensor([0, 7, 8, 9, 15, 16, 63, 64, 65, 129, 129, 3])
ORDERS = {"plain": (False, False), "tiles": (True, False), "blocks": (False, True)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_are_those_of_the_whole_matrix(bits: int, group_size: int, order: str, monkeypatch) -> None:
    tiles, blocks = ORDERS[order]
    if (tiles and bits not in (4, 8)) or (blocks and bits != 4):
        pytest.skip("codes of so many bits have no such order")
    monkeypatch.setattr(packed_int, "tiles_on", lambda *_: tiles)
    monkeypatch.setattr(packed_int, "blocks_on", lambda *_: blocks)
    scheme = Scheme(bits, group_size)
    for total in (130, 131):  # two rows to a byte, or not
        parts, weight, _ = make_parts(scheme, [total], 128)
        module = make_module(scheme, parts, [total], 128)
        assert isinstance(module, PackedInt) and (module.tiled, module.blocked) == (tiles, blocks)
        assert torch.equal(module.rows(INDEX, torch.float64), weight[INDEX])
        assert torch.equal(module.rows(INDEX[:0], torch.float32), weight[:0].float())


SCHEMES = {
    "int4 with zero points": Scheme(4, 32, symmetric=False),
    "int8": Scheme(8, 0, "int-quantized"),
    "fp8": Scheme(8, layout="float-quantized", number="e4m3"),
    "fp8 blocks": Scheme(8, layout="float-quantized", number="e4m3", block=(32, 32)),
    "mxfp4": Scheme(4, 32, "mxfp4-pack-quantized", number="e2m1", scales="e8m0"),
    "nvfp4": Scheme(4, 16, "nvfp4-pack-quantized", number="e2m1", scales="e4m3"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_other_formats(name: str) -> None:
    scheme, module = SCHEMES[name], Dequantizing(128, 130, False, scheme=SCHEMES[name])
    weights = torch.randn(130, 128, generator=torch.Generator().manual_seed(0))
    high, wide = scheme.extent(130, 128)
    grid = scheme.grid(130, 128)
    scales, divisor, points = torch.rand(grid, generator=torch.Generator().manual_seed(1)) + 0.5, None, None
    if scheme.scales == "e4m3":
        scales, divisor = scales.to(torch.float8_e4m3fn), torch.tensor([2.0])
    elif scheme.scales == "e8m0":
        scales = scales.to(torch.float8_e8m0fnu)
    if not scheme.symmetric:
        points = torch.ones(grid, dtype=torch.int8)
    stored = scheme.quantize(weights, scales, points, divisor)
    from hone.model.quantized.layouts import write

    module.load([write(stored)])
    assert torch.equal(module.rows(INDEX, torch.float32), stored.weight(torch.float32)[INDEX]), (high, wide)
