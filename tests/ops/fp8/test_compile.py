"""The kernels for blocks of 128 compile for Hopper: fp8 tensor-core products, sixteen bytes a load, no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hone.ops.fp8.triton_blocks import BLOCK, TILES, Tile, block_sums, cast_blocks
from tests.ops.compiled import compile_triton

SIZES = dict.fromkeys(("M", "N", "K", "stride"), "i32")


@pytest.mark.parametrize("square", [False, True])
def test_casts(square: bool) -> None:
    types = {"x": "*bf16"} | dict.fromkeys(("codes", "codes_t"), "*fp8e4nv")
    types |= dict.fromkeys(("scales", "scales_t"), "*fp32") | {name: SIZES[name] for name in ("M", "K", "stride")}
    options = {"SQUARE": square, "ROWS": True, "COLUMNS": True, "TOP": 8, "BLOCK": BLOCK}
    record = compile_triton(cast_blocks, types, options, num_warps=8, divisible=("M", "K", "stride"))
    assert record.clean and record.count("LDG.E.128") and record.count("STG.E.128"), record.line()


@pytest.mark.parametrize("tile", [TILES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in TILES[1:])])
@pytest.mark.parametrize("square", [False, True])
def test_products(square: bool, tile: Tile) -> None:
    types = {"out": "*bf16", "bias": "*bf16"} | dict.fromkeys(("a", "b"), "*fp8e4nv")
    types |= dict.fromkeys(("a_scales", "b_scales"), "*fp32") | {name: SIZES[name] for name in ("M", "N", "K")}
    options = {"SQUARE": square, "HAS_BIAS": False, "EVEN": True, "TOGETHER": 8}
    options |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    record = compile_triton(block_sums, types, options, **how, divisible=("M", "N", "K"))
    assert record.clean, record.line()
    assert record.count("QGMMA") and record.count("LDGSTS"), record.line()
