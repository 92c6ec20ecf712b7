"""The products of many tokens per expert compile for Hopper: wgmma overlapped with loads, no spills; and their tiles cover all rows."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hone.ops.moe.gluon_grouped import MAX_REGISTERS, REGISTERS, SPAN, STEP, rows_product, tile_of, weights_product
from tests.ops.compiled import compile_gluon, descriptor


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("features", [2816, 1408])
def test_products_of_rows(features: int, turned: bool) -> None:
    width, stages = tile_of(features)
    record = compile_gluon(
        rows_product,
        {
            "x_desc": descriptor("bf16", [64, STEP]),
            "w_desc": descriptor("bf16", [1, STEP, width] if turned else [1, width, STEP]),
            "out_desc": descriptor("bf16", [64, width]),
            "out": "*bf16",
            "tiles": "*i32",
        }
        | integers("most num_features steps F"),
        {"STAGES": stages, "SPAN": SPAN, "TURNED": turned, "REGS": REGISTERS},
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    assert record.clean, record.line()
    assert record.waits() == [1, 0, 1, 0]  # one product in flight until a tile's last


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2048, 1408])
def test_products_of_weights(columns: int) -> None:
    width, stages = tile_of(columns)
    record = compile_gluon(
        weights_product,
        {
            "dy_desc": descriptor("bf16", [STEP, 64]),
            "x_desc": descriptor("bf16", [STEP, width]),
            "out_desc": descriptor("bf16", [1, 64, width]),
            "ends": "*i32",
        }
        | integers("num_experts tiles_m tiles_n"),
        {"STAGES": stages, "REGS": REGISTERS},
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    assert record.clean, record.line()
    assert record.waits() == [1, 0, 1, 0]
