"""The scan kernels compile for Hopper without spills, on tensor cores, within the shared memory of two programs at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton.language as tl

from hone.ops.compat import INTERPRETED
from hone.ops.scan import gluon_outputs as hopper
from hone.ops.scan import triton_channel_chunks as chunks
from hone.ops.scan import triton_channel_passes as passes
from hone.ops.scan import triton_kernels as kernels
from tests.ops.compiled import SHARED_LIMIT, compile_gluon, compile_triton, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")


def box(chunk, columns):
    return f"tensordesc<bf16[1,1,{chunk},{columns}]>"


def numbers(names):
    return dict.fromkeys(names.split(), "i32")


@pytest.mark.slow
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


@pytest.mark.slow
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
        signature["decays_desc"] = descriptor("fp32", [256], hopper.FLAT)
    else:
        fixed["decays_desc"] = None
    aligned = ["dim_k", "dim_v", "other_b", "other_s", "other_h", "start_place", "start_k"]
    record = compile_gluon(hopper._outputs, signature, fixed, divisible=aligned)
    assert record.clean, record.line()
    assert 2 * (record.shared + 1024) <= 228 << 10, record.line()
    assert record.waits() == [1, 0, 1, 0], record.line()
    assert record.count("HGMMA") == 8 + 8 + 4 + 8, record.line()


def wide_box(columns):
    return f"tensordesc<fp32[1,1,64,{columns}]>"


def of_channels(kernel, signature, fixed, **options):
    """The record of a kernel with a decay a channel that reads resets and shares no head."""
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    shared = {name: 1 for name in kernel.arg_names if name.startswith("share_")}
    plain = {
        name: "fp32" if name == "scale" else "*i1" if name == "reset" else "i32"
        for name in kernel.arg_names
        if name not in {*signature, *fixed, *shared}
    }
    record = compile_triton(
        kernel, {**signature, **plain}, {**shared, **fixed}, divisible=["dim_k", "dim_v"], **options
    )
    assert record.clean, record.line()
    assert record.count("HGMMA") > 0, record.line()
    return record


@pytest.mark.slow
def test_chunks_with_a_decay_a_channel():
    few = box(64, chunks.FEW)
    fixed = {"CHUNK": 64, "BLOCK_K": 128, "BLOCK_V": 128, "FEW": chunks.FEW, "WIDE": 64, "LEVELS": 6}
    fixed |= {"RESET": True, "CHANGES": True}
    signature = dict.fromkeys(["q_desc", "k_desc", "queries_desc", "keys_desc"], few)
    signature |= {"pairs_desc": box(64, 64), "fallen_desc": wide_box(chunks.FEW), "fallen": "*fp32"}
    record = of_channels(chunks._weigh, signature, fixed, num_warps=8, num_stages=1)
    assert record.registers <= 128, record.line()  # two programs of 8 warps
    signature = {**dict.fromkeys(["q_desc", "k_desc"], few), **dict.fromkeys(["v_desc", "d_out_desc"], box(64, 64))}
    signature |= dict.fromkeys(["fallen_desc", "dq_desc", "dk_desc", "change_desc"], wide_box(chunks.FEW))
    of_channels(chunks._within, {**signature, "fallen": "*fp32"}, fixed, num_warps=8, num_stages=1)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "block_v", "stages"), [(128, 64, 2), (256, 32, 1)])
def test_outputs_with_a_decay_a_channel(dim, block_v, stages):
    signature = {**dict.fromkeys(["q_desc", "k_desc"], box(64, dim)), "v_desc": box(64, block_v)}
    signature |= {"pairs_desc": box(64, 64), "mixed": "*bf16", **dict.fromkeys(["starts", "final", "through"], "*fp32")}
    fixed = {"CHUNK": 64, "BLOCK_K": dim, "BLOCK_V": block_v, "REVERSE": True, "STARTS": True, "start_v": 1}
    fixed |= {"STATE_DTYPE": tl.bfloat16, "STAGES": stages}
    record = of_channels(passes._outputs, signature, fixed)
    assert 2 * (record.shared + 1024) <= 228 << 10, record.line()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "reverse", "warps"), [(128, False, 4), (128, True, 4), (256, True, 8)])
def test_gradients_with_a_decay_a_channel(dim, reverse, warps):
    few, wide = box(64, chunks.FEW), wide_box(chunks.FEW)
    signature = {**dict.fromkeys(["rows_desc", "columns_desc"], box(64, dim))}
    signature |= dict.fromkeys(["weighed_desc", "with_desc", "out_desc"], few)
    signature |= dict.fromkeys(["fallen_desc", "within_desc", "change_desc"], wide)
    signature |= dict.fromkeys(["starts", "fallen", "through", "later"], "*fp32")
    fixed = {"CHUNK": 64, "BLOCK_V": dim, "BLOCK_K": chunks.FEW, "RESET": True, "REVERSE": reverse, "STARTS": True}
    fixed |= {"CHANGES": True, "STATE_DTYPE": tl.bfloat16, "STAGES": 1, "start_v": 1}
    record = of_channels(passes._gradients, signature, fixed, num_warps=warps)
    assert 2 * (record.shared + 1024) <= 228 << 10, record.line()


def test_part_states_with_a_decay_a_channel():
    signature = {**dict.fromkeys(["k_desc", "v_desc"], box(64, 128))}
    signature |= dict.fromkeys(["states", "passes", "through"], "*fp32")
    fixed = {"CHUNK": 64, "BLOCK_K": 128, "BLOCK_V": 128, "REVERSE": False, "STAGES": 3}
    of_channels(passes._part_states, signature, fixed, num_warps=8)
