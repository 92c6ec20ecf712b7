"""The Hopper attention backward: its choice of tiles, and that its kernels compile without losing the overlap of products."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from hone.base.errors import SpecError
from hone.ops.attention.gluon_backward import BLOCK_N, config, tile_shape
from hone.ops.attention.gluon_gradients import flash_backward
from hone.ops.attention.gluon_passes import finish, prepare
from hone.ops.attention.gluon_ranges import QUERIES
from hone.ops.attention.masks import gluon_function
from hone.ops.compat import INTERPRETED
from tests.ops.compiled import SHARED_LIMIT, Compiled, compile_gluon, compile_triton, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

ANALYTIC = {"RULE": None, "QUERIES": None, "PARAMS": (), "HAS_DATA": (False, False)}


def compiled(head_dim: int, dtype: str = "bf16", softcap: float | None = None, group: int = 1, **mask) -> Compiled:
    plan = config(head_dim)
    rows = descriptor(dtype, [1, plan.block_m, 1, head_dim])
    half = descriptor(dtype, [1, 64, 1, head_dim])
    flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    signature = {
        **dict.fromkeys(["q", "d_out"], rows),
        **dict.fromkeys(["k", "v", "dk", "dv"], half),
        "stats": descriptor("fp32", [plan.block_m], flat),
        "dq": descriptor("fp32", [64, 64]),
        **dict.fromkeys(["q_count", "q_index", "q_partial", "q_order", "k_data", "counter"], "*i32"),
        **dict.fromkeys(["list_b", "list_h", "k_data_b", "k_data_h"], "i32"),
        **dict.fromkeys(["num_tiles", "num_kv_heads", "seq_q", "seq_k"], "i32"),
        "scale": "fp32",
    }
    fixed = {
        "GROUP": group,
        "SOFTCAP": softcap,
        "BM": plan.block_m,
        "D": head_dim,
        "STAGES": plan.stages,
        "DS_STAGES": plan.ds_stages,
        "SOFTMAX_REGS": plan.softmax_regs,
        "DQ_REGS": plan.dq_regs,
        "DYNAMIC": plan.dynamic,
        **mask,
    }
    return compile_gluon(flash_backward, signature, fixed, maxnreg=128)


def steps(record: Compiled, head_dim: int) -> None:
    """Products of both loops of both softmax warpgroups and of dQ's, all asynchronous, in one block's shared memory."""
    assert not record.serialized, record.line()
    assert record.shared <= SHARED_LIMIT
    a_step = 2 * head_dim // 16 + 2 * config(head_dim).block_m // 16
    assert record.count("HGMMA") == 2 * 2 * a_step + 2 * 2 * 64 // 16, record.line()
    # Each step of a softmax warpgroup waits with a product still under way, twice.
    assert record.waits().count(1) == 2 * 2 * 2, record.line()
    assert record.count("UTMAREDG") == 2


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal(head_dim):
    record = compiled(head_dim, MASK="causal", **ANALYTIC)
    steps(record, head_dim)
    # A few numbers of a tile, none of a step of the loop without a mask.
    assert record.spill_bytes <= 600, record.line()


def test_full_half_precision():
    steps(compiled(128, "fp16", MASK="full", **ANALYTIC), 128)


@pytest.mark.slow
def test_lists_with_a_rule_and_shared_heads():
    rule = gluon_function("hone.ops.attention.masks:_since")
    mask = {"MASK": "lists", "RULE": rule, "QUERIES": None, "PARAMS": (), "HAS_DATA": (True, False)}
    record = compiled(128, group=4, **mask)
    steps(record, 128)
    assert record.spill_bytes <= 1600, record.line()


@pytest.mark.slow
def test_lists_with_a_range_of_queries_for_each_key():
    name = "hone.ops.attention.masks:_band"
    mask = {"MASK": "lists", "RULE": gluon_function(name), "QUERIES": gluon_function(QUERIES[name])}
    record = compiled(128, PARAMS=(1023, 0), HAS_DATA=(False, False), **mask)
    steps(record, 128)
    assert record.spill_bytes <= 600, record.line()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_passes(dtype):
    strides = ["out_b", "out_s", "out_h", "d_out_b", "d_out_s", "d_out_h"]
    numbers = dict.fromkeys(
        [*strides, "q_data_b", "q_data_h", "seq_q", "num_heads", "num_lists", "num_n", "num_kv", "share"], "i32"
    )
    tensors = {
        "out": f"*{dtype}",
        "d_out": f"*{dtype}",
        **dict.fromkeys(["lse", "d_lse", "stats", "dq_sum"], "*fp32"),
        **dict.fromkeys(["counter", "q_data", "q_count", "q_order"], "*i32"),
    }
    fixed = {"LISTS": True, "HAS_DATA": True, "HAS_D_LSE": True, "HEAD_DIM": 128, "ROWS": 64}
    before = compile_triton(prepare, {**tensors, **numbers}, fixed, divisible=strides)
    assert before.clean and before.count("LDG.E.128") >= 2 and before.count("STG.E.128") >= 1, before.line()
    numbers = dict.fromkeys(["dq_b", "dq_s", "dq_h", "seq_q", "num_heads"], "i32")
    signature = {"dq_sum": "*fp32", "dq": f"*{dtype}", "scale": "fp32", **numbers}
    after = compile_triton(finish, signature, {"HEAD_DIM": 128, "ROWS": 64}, divisible=["dq_b", "dq_s", "dq_h"])
    assert after.clean and after.count("LDG.E.128") >= 2 and after.count("STG.E.128") >= 1, after.line()


def test_tiles():
    assert tile_shape(128, 128) == (64, BLOCK_N)
    assert tile_shape(64, 64, 256) == (128, BLOCK_N)
    with pytest.raises(SpecError, match="not 96"):
        config(96)
    with pytest.raises(SpecError, match="blocks of 64"):
        tile_shape(128, 128, 64)
    with pytest.raises(SpecError, match="128/64"):
        tile_shape(128, 64)
    for head_dim in (64, 128):
        plan = config(head_dim)
        # What a block's 4 groups of 128 threads may hold together.
        assert 2 * plan.softmax_regs + plan.dq_regs + 24 <= 512
