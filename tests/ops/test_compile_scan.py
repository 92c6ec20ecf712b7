"""The scan kernels compile for Hopper without spills, on tensor cores, within the shared memory of two programs at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton.language as tl

from hone.ops.compat import INTERPRETED
from hone.ops.gluon import scan as hopper
from hone.ops.triton import scan as kernels
from hone.ops.triton import scan_channel
from tests.ops.compiled import SHARED_LIMIT, compile_gluon, compile_triton, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")


def box(chunk, columns):
    return f"tensordesc<bf16[1,1,{chunk},{columns}]>"


def numbers(names):
    return dict.fromkeys(names.split(), "i32")


@pytest.mark.parametrize(("mode", "reverse"), [(kernels.NO_DECAY, False), (kernels.TOKEN_DECAY, True)])
def test_outputs(mode, reverse):
    """Two programs share a multiprocessor: 64 k registers, 227 KiB."""
    wide, narrow = box(64, 128), box(64, 64)
    signature = {
        "q_desc": wide,
        "k_desc": wide,
        "v_desc": narrow,
        "out_desc": narrow,
        "with_desc": narrow,
        "starts": "*fp32",
        "final": "*fp32",
        "dots": "*fp32",
        "decay": "*fp32",
        "reset": "*i1",
        "scale": "fp32",
        **numbers("seq_len seg_chunks num_segs batches heads dim_k dim_v start_place start_k tiles_v"),
        **numbers("decay_b decay_s reset_b"),
    }
    fixed = {
        **dict.fromkeys(["share_q", "share_k", "share_v", "share_with", "start_v", "decay_h"], 1),
        "CHUNK": 64,
        "BLOCK_K": 128,
        "BLOCK_V": 64,
        "MODE": mode,
        "RESET": False,
        "REVERSE": reverse,
        "STARTS": True,
        "FINAL": True,
        "DOTS": False,
        "STATE_DTYPE": tl.bfloat16,
        "STAGES": 2,
    }
    record = compile_triton(kernels._outputs, signature, fixed, divisible=["dim_k", "dim_v"])
    assert record.clean, record.line()
    assert 2 * record.shared <= SHARED_LIMIT, record.line()
    assert record.count("HGMMA") == 8 + 8 + 4 + 8, record.line()  # q k^T, q S, scores v, k^T v in steps of 16


def test_part_states():
    signature = {
        "k_desc": box(64, 128),
        "v_desc": box(64, 64),
        "states": "*fp32",
        "passes": "*fp32",
        "decay": "*fp32",
        "reset": "*i1",
        **numbers("seq_len seg_chunks num_segs part_chunks parts heads dim_k dim_v tiles_v decay_b decay_s reset_b"),
    }
    fixed = {
        **dict.fromkeys(["share_k", "share_v", "decay_h"], 1),
        "CHUNK": 64,
        "BLOCK_K": 128,
        "BLOCK_V": 64,
        "MODE": kernels.TOKEN_DECAY,
        "RESET": True,
        "REVERSE": False,
        "STAGES": 3,
    }
    record = compile_triton(kernels._part_states, signature, fixed, divisible=["dim_k", "dim_v"])
    assert record.clean, record.line()
    assert record.count("HGMMA") > 0, record.line()


@pytest.mark.parametrize(("falls", "reverse"), [(False, False), (True, True)])
def test_outputs_on_hopper(falls, reverse):
    """Products wait for each other only where they must: once with another one under way, then for both, twice."""
    wide, narrow = descriptor("bf16", [1, 1, 64, 128]), descriptor("bf16", [1, 1, 64, 64])
    signature = {
        "q_desc": wide,
        "k_desc": wide,
        "v_desc": narrow,
        "out_desc": narrow,
        **dict.fromkeys(["through", "starts", "final", "dots"], "*fp32"),
        "other": "*bf16",
        "scale": "fp32",
        **numbers("seq_len seg_chunks num_segs batches heads dim_k dim_v start_place start_k"),
        **numbers("other_b other_s other_h tiles_v"),
    }
    fixed = {
        **dict.fromkeys(["share_q", "share_k", "share_v", "share_other", "start_v"], 1),
        "FALLS": falls,
        "RESET": falls,
        "REVERSE": reverse,
        "STARTS": True,
        "FINAL": True,
        "DOTS": falls,
    }
    if falls:
        signature["facts_desc"] = descriptor("fp32", [256], hopper.FLAT)
    else:
        fixed["facts_desc"] = None
    aligned = ["dim_k", "dim_v", "other_b", "other_s", "other_h", "start_place", "start_k"]
    record = compile_gluon(hopper._outputs, signature, fixed, divisible=aligned)
    assert record.clean, record.line()
    assert 2 * (record.shared + 1024) <= 228 << 10, record.line()
    assert record.waits() == [1, 0, 1, 0], record.line()
    assert record.count("HGMMA") == 8 + 8 + 4 + 8, record.line()


@pytest.mark.parametrize(("on_values", "dim_k", "block_v"), [(False, 128, 64), (True, 128, 32), (False, 256, 32)])
def test_outputs_with_a_decay_a_channel(on_values, dim_k, block_v):
    rows = scan_channel.CHUNK
    wide, narrow, few = box(rows, dim_k), box(rows, block_v), box(rows, 32)
    signature = {
        **dict.fromkeys(["q_desc", "k_desc"], wide),
        **dict.fromkeys(["v_desc", "out_desc"], narrow),
        "g_desc": f"tensordesc<fp32[1,1,{rows},{block_v if on_values else dim_k}]>",
        **dict.fromkeys(["q_few", "k_few"], few),
        "g_few": f"tensordesc<fp32[1,1,{rows},32]>",
        "starts": "*fp32",
        "final": "*fp32",
        "reset": "*i1",
        "scale": "fp32",
        **numbers("seq_len seg_chunks num_segs heads dim_k dim_v start_place start_k tiles_v reset_b"),
    }
    fixed = {
        **dict.fromkeys(["share_q", "share_k", "share_v", "start_v"], 1),
        "CHUNK": rows,
        "BLOCK_K": dim_k,
        "BLOCK_V": block_v,
        "FEW": 32,
        "LEVELS": 4,
        "ON_VALUES": on_values,
        **dict.fromkeys(["RESET", "REVERSE", "STARTS", "FINAL"], True),
        "STATE_DTYPE": tl.bfloat16,
    }
    record = compile_triton(scan_channel._outputs, signature, fixed, divisible=["dim_k", "dim_v"], num_stages=1)
    assert record.clean, record.line()
    assert record.count("HMMA") + record.count("HGMMA") > 0, record.line()
