"""The Hopper attention forward compiled: asynchronous products, nothing spilled, whatever the mask."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hone.ops.attention import gluon_forward as flash
from hone.ops.attention.gluon_ranges import KEYS
from hone.ops.attention.masks import gluon_function
from hone.ops.compat import INTERPRETED
from hone.ops.descriptors import boxes
from tests.ops.compiled import Compiled, compile_gluon, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

SINCE = {"KIND": "lists", "RULE": "hone.ops.attention.masks:_since", "PARAMS": (), "DATA": (True, False)}
BAND = {"KIND": "lists", "RULE": "hone.ops.attention.masks:_band", "PARAMS": (1023, 0), "DATA": (False, False)}
SAME = {"KIND": "lists", "RULE": "hone.ops.attention.masks:_same_document", "PARAMS": (), "DATA": (True, True)}
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
        "PARTS": flash.PARTS,
        "STAGES": config.stages,
        "Q_REG": config.q_in_registers,
        "REGS": flash.REGISTERS,
        "TURNS": config.turns,
        **mask,
        "RULE": mask["RULE"] and gluon_function(mask["RULE"]),
        "RANGE": gluon_function(KEYS[mask["RULE"]]) if mask["RULE"] in KEYS else None,
    }
    return compile_gluon(flash.flash_forward, signature, constants, maxnreg=flash.MAX_REGISTERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(128, CAUSAL), (64, CAUSAL), (128, SINCE), (128, BAND), (128, SAME)],
    ids=["128", "64", "since", "band", "same"],
)
def test_forward(head_dim: int, mask: dict) -> None:
    record = compiled(head_dim, **mask)
    assert record.clean, record.line()
    assert record.count("HMMA") == 0
    # Every step, and every way from one tile to the next, has a product under way while it waits for the one before.
    assert record.waits().count(1) >= 2 * 2, record.line()


def test_boxes_have_legal_strides() -> None:
    line = torch.empty(7 * 72, dtype=torch.bfloat16)
    found = boxes(line.as_strided((1, 7, 1, 68), (3, 72, 5, 1)), 1, 64, 1, 64)
    assert found.shape == [1, 7, 1, 68] and found.strides == [72, 72, 72, 1] and found.block_shape == [1, 64, 1, 64]
    assert found.layout.element_bitwidth == 16 and found.layout.rank == 4
    assert boxes(line.float().view(7, 72), 64, 64).layout.element_bitwidth == 32
