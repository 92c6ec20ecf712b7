"""The Hopper attention forward compiled: asynchronous products, nothing spilled, whatever the mask."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hone.ops.compat import INTERPRETED
from hone.ops.gluon import flash, flash_order
from hone.ops.masks import _gluon_rule
from tests.ops.compiled import Compiled, compile_gluon, compile_triton, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

SINCE = {"KIND": "lists", "RULE": "hone.ops.masks:_since", "PARAMS": (), "DATA": (True, False)}
CHUNKS = {"KIND": "lists", "RULE": "hone.ops.masks:_lsh", "PARAMS": (64, 4096), "DATA": (True, True)}
CAUSAL = {"KIND": "causal", "RULE": None, "PARAMS": (), "DATA": (False, False)}


def compiled(head_dim: int, *, softcap: bool = False, dtype: str = "bf16", **mask) -> Compiled:
    config = flash.tile_config(head_dim)
    rows, keys = (descriptor(dtype, [1, length, 1, head_dim]) for length in (64, config.block_n))
    numbers = ["counter", "order", "kv_index", "q_data", "k_data"]
    signature = {
        "q_desc": rows,
        "k_desc": keys,
        "v_desc": keys,
        "o_desc": rows,
        "lse": "*fp32",
        **dict.fromkeys(numbers, "*i32"),
        **dict.fromkeys(flash._SIZES, "i32"),
        **dict.fromkeys(["scale_log2", "cap", "cap_log2"], "fp32"),
    }
    constants = {
        "GROUP": 4,
        "CAP": softcap,
        "PARTS": flash._PARTS,
        "STAGES": config.stages,
        "Q_REG": config.q_in_registers,
        "REGS": flash._REGISTERS,
        "TURNS": config.turns,
        **mask,
        "RULE": mask["RULE"] and _gluon_rule(mask["RULE"]),
    }
    return compile_gluon(flash.flash_forward, signature, constants, maxnreg=flash._MAX_REGISTERS)


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(128, CAUSAL), (64, CAUSAL), (128, SINCE), (128, CHUNKS)],
    ids=["128", "64", "since", "chunks"],
)
def test_forward(head_dim: int, mask: dict) -> None:
    record = compiled(head_dim, **mask)
    assert record.clean, record.line()
    assert record.count("HMMA") == 0
    # Every step, and every way from one tile to the next, has a product under way while it waits for the one before.
    assert record.waits().count(1) >= 2 * 2, record.line()


def test_order_of_tiles() -> None:
    signature = dict.fromkeys(["kv_count", "kv_index", "kv_partial", "made"], "*i32") | {"num_m": "i32", "num_n": "i32"}
    record = compile_triton(flash_order.order_tiles, signature, {"BLOCK": flash_order._BLOCK}, num_warps=4)
    assert record.clean, record.line()
