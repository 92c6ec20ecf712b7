"""The products of many tokens per expert compile for Hopper: wgmma overlapped with loads, no spills; and their tiles cover all rows."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hone.ops.moe.gluon_grouped import MAX_REGISTERS, REGISTERS, ROWS, SPAN, STEP, list_tiles, rows_product, tile_of
from hone.ops.moe.gluon_grouped_sums import weights_product
from hone.ops.moe.triton_kernels import piece_spans, spread_places
from tests.ops.compiled import compile_gluon, compile_triton, descriptor, fp32


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "turned"), [("bf16", False), ("bf16", True), ("fp8e4nv", False)])
@pytest.mark.parametrize("features", [2816, 1408])
def test_products_of_rows(features: int, factors: str, turned: bool) -> None:
    width, stages = tile_of(features)
    step = STEP if factors == "bf16" else 2 * STEP
    record = compile_gluon(
        rows_product,
        {
            "x_desc": descriptor(factors, [64, step]),
            "w_desc": descriptor(factors, [1, step, width] if turned else [1, width, step]),
            "out_desc": descriptor("bf16", [64, width]),
            "out": "*bf16",
            "tiles": "*i32",
        }
        | fp32("x_scales", "w_scales")
        | integers("most num_features steps F"),
        {"STAGES": stages, "SPAN": SPAN, "TURNED": turned, "SCALED": factors != "bf16", "REGS": REGISTERS},
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    assert record.clean, record.line()
    assert record.waits() == [1, 0, 1, 0]  # one product in flight until a tile's last


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "pieces"), [("bf16", 0), ("bf16", 2), ("fp8e4nv", 0)])
@pytest.mark.parametrize("columns", [2048, 1408])
def test_products_of_weights(columns: int, factors: str, pieces: int) -> None:
    (width, stages), scaled = tile_of(columns), factors != "bf16"
    record = compile_gluon(
        weights_product,
        {
            "dy_desc": descriptor(factors, [64, 2 * STEP] if scaled else [STEP, 64]),
            "x_desc": descriptor(factors, [width, 2 * STEP] if scaled else [STEP, width]),
            "out_desc": descriptor("bf16", [1, 64, width]),
            "starts": "*i32",
            "ends": "*i32",
        }
        | fp32("dy_scales", "x_scales")
        | integers("num_experts tiles_m tiles_n N K"),
        {"STAGES": stages, "PIECES": pieces, "SCALED": scaled, "REGS": REGISTERS},
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    assert record.clean, record.line()
    assert record.waits() == [1, 0, 1, 0]


@pytest.mark.slow
def test_places_and_spans_of_rows_in_pieces() -> None:
    places = {"ids": "*i64", "place": "*i32", "ends": "*i32", "to": "*i32", "order": "*i32"}
    kernels = [
        (spread_places, places | integers("num_ids num_places room each"), {"BLOCK": 512}),
        (
            piece_spans,
            {"counts": "*i64", "ends": "*i32", "starts": "*i32"} | integers("first room"),
            {"own": 32, "num_pieces": 2, "EXPERTS": 32, "PIECES": 2},
        ),
        (
            list_tiles,
            {"starts": "*i32", "ends": "*i32", "tiles": "*i32"} | integers("num_rows num_experts most"),
            {"SPANS": 64, "PIECES": 2, "BLOCK": 64, "TILE": ROWS, "STEP": STEP},
        ),
    ]
    for kernel, types, constants in kernels:
        record = compile_triton(kernel, types, constants, num_warps=4)
        assert record.spill_bytes == 0, record.line()
