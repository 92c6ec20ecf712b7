"""Small kernels compiled for Hopper without a GPU: no spills, and the instructions that make them fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hone.ops.activation import triton_kernels as gate
from hone.ops.loss import triton_kernels as loss
from hone.ops.loss.api import ROW_BLOCK
from hone.ops.moe import triton_experts as layers
from hone.ops.moe import triton_kernels as grouped
from hone.ops.moe import triton_routing as choice
from hone.ops.moe import triton_visits as alone
from hone.ops.moe.api import few_shape
from hone.ops.moe.launch_experts import ALONE_ROWS, expert_shape, tile_of
from hone.ops.moe.weights import ExpertWeights
from hone.ops.nf4 import triton_kernels as nf4
from hone.ops.norm import triton_kernels as norm
from hone.ops.rope import triton_kernels as turn
from hone.ops.rounding import triton_kernels as rounding
from hone.ops.sample import triton_bitmask
from hone.ops.sample import triton_kernels as draw
from hone.ops.sample import triton_tables as tables
from hone.ops.sample.api import draw_shape, floor_shape
from hone.ops.sample.bitmask import BLOCK as MASK_BLOCK
from hone.ops.update import triton_kernels as update
from hone.serve.speculation import triton_rounds as rounds
from tests.ops.compiled import NUMBERS, bf16, compile_simple, compile_triton, fp32


def test_norm() -> None:
    rows, block, warps = norm.tile(4096)
    shape = {"RESIDUAL": True, "WIDTH": 4096, "ROWS": rows, "BLOCK": block}
    types = bf16("x", "residual", "weight", "y", "summed", "grad_x", "upstream", "upstream_sum")
    types |= fp32("rstd", "scales", "partial") | NUMBERS
    forward = compile_simple(
        norm.rms_norm_forward, types, {**shape, "KEEPS": True, "QUANTIZED": False, "EARLY": True}, warps
    )
    backward = compile_simple(norm.rms_norm_backward, types, {**shape, "WEIGHT": True, "STAGES": 3}, warps)
    for record in (forward, backward):
        assert record.clean
        assert record.count("LDG.E.128") or record.count("LDG.E.EF.128")


def test_nf4() -> None:
    types = {"words": "*i32", "scales": "*u8", "first": "i32", "num_words": "i32"}
    types |= bf16("out") | fp32("table", "values", "outer", "offsets")
    shape = {"BLOCK_WORDS": 8, "WORDS": nf4.WORDS_A_PROGRAM, "NESTED": True, "SHARED": 256}
    record = compile_simple(nf4.dequantize, types, shape, 4)
    assert record.clean and record.registers <= 64  # 8 programs fit a multiprocessor
    assert record.count("STG.E.128") == 4  # 8 weights of 16 bits at once


def test_gate() -> None:
    block, warps = gate.gate_shape(14336)
    types = bf16("gate_up", "out", "upstream", "grad")
    types |= {"limit": "fp32", "alpha": "fp32"}
    kernels = (
        (gate.swiglu_forward, 2),
        (gate.swiglu_backward, 3),
        (gate.clamped_forward, 2),
        (gate.clamped_backward, 3),
    )
    for kernel, loads in kernels:
        taken = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        early = {"EARLY": True} if "EARLY" in kernel.arg_names else {}
        record = compile_simple(kernel, taken, {"WIDTH": 14336, "BLOCK": block, **early}, warps)
        assert record.clean and record.count("LDG.E.128") == loads
        assert not record.count("I2F")  # no division before the loads


@pytest.mark.parametrize("teacher", [False, True])
def test_loss(teacher: bool) -> None:
    block, warps, stages = ROW_BLOCK
    types = bf16("logits", "teacher") | {"targets": "*i64"} | fp32("losses", "factor") | NUMBERS
    constants = {"TEACHER": teacher, "SMOOTH": False, "GRAD": True, "BLOCK": block, "STAGES": stages}
    record = compile_simple(loss.cross_entropy_rows, types, constants, warps)
    assert record.clean and record.count("MUFU.EX2")


@pytest.mark.parametrize(
    ("rounds", "keep", "stay"), [(True, False, 0), (True, True, 0), (True, True, 4), (False, True, 2)]
)
def test_rounding_stays_in_registers(rounds: bool, keep: bool, stay: int) -> None:
    types = fp32("target", "wanted", "steps", "ratio", "weights", "solved", "errors") | NUMBERS
    types |= {"low": "fp32", "high": "fp32", "keep": "*u8", "solved": "*i8" if rounds else "*fp32"}
    rows = rounding.PATTERN_ROWS if stay else rounding.ROWS
    shape = {"STAY": stay, "GROUP": 2 * stay or 64, "BLOCK": 64, "ROWS": rows}
    record = compile_simple(rounding.solve_columns, types, {"ROUND": rounds, "KEEP": keep, **shape}, 1)
    assert record.clean and not record.count("LDL")


def test_an_update_moves_sixteen_bytes_at_a_time() -> None:
    types = fp32("weight", "exp_avg", "exp_avg_sq", "factor") | bf16("grad", "rounded") | NUMBERS
    types |= dict.fromkeys(("keep", "rate", "fresh1", "beta2", "fresh2", "root", "eps"), "fp32")
    shape = {"SCALE": True, "ROUND": True, "EVEN": True, "BLOCK": update.BLOCK}
    record = compile_simple(update.adamw_step, types, shape, update.WARPS)
    assert record.clean and record.count("LDG.E.128") and record.count("STG.E.128") and not record.count("STG.E.U16")
    for pair in (False, True):
        record = compile_simple(
            update.widen,
            bf16("source", "other") | fp32("into") | NUMBERS,
            {"ADD": False, "PAIR": pair, "EVEN": True, "BLOCK": update.BLOCK},
            update.WARPS,
        )
        assert record.clean and record.count("STG.E.128") and not record.count("LDG.E.U16")


@pytest.mark.parametrize(("fixed", "normed"), [(False, False), (True, True)])
def test_rope_write_with_codes(fixed: bool, normed: bool) -> None:
    types = (
        bf16("q", "k", "v", "cos", "sin", "q_norm", "k_norm")
        | {"eps": "fp32"}
        | dict.fromkeys(("k_pages", "v_pages"), "*fp8e4nv")
        | NUMBERS
    )
    types |= {"pages": "*i64", "offsets": "*i64"} | fp32("k_scale", "v_scale")
    heads, half, warps = turn.rope_shape(32, 128)
    record = compile_simple(
        turn.rope_write,
        types,
        {"SCALED": True, "FIXED": fixed, "NORMED": normed, "HEADS": heads, "HALF": half, "VALUES": 128, "EARLY": True},
        warps,
    )
    assert record.clean


def test_few_tokens_streams_weights_through_shared_memory() -> None:
    block_n, block_k, stages, warps = few_shape(1536, 2048)
    shape = {"EVEN_K": True, "TOKENS": 16, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages}
    record = compile_simple(grouped.few_tokens, bf16("x", "weight", "out") | {"ends": "*i32"}, shape, warps)
    assert record.clean
    assert record.count("HGMMA") and record.count("LDGSTS")


STORED = {
    "dense": torch.bfloat16,
    "int4": torch.uint8,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
}
KINDS = {"dense": "*bf16", "int4": "*u8", "int8": "*i8", "fp8": "*fp8e4nv", "mxfp4": "*u8"}
WIDTHS = {"dense": 0, "mxfp4": 32}
"""Columns that share a scale, where they are not 128."""


def compile_experts(kernel: Any, kind: str, constants: dict[str, Any], warps: int = 4) -> Any:
    """A kernel of a layer of Qwen3-30B-A3B's experts, with scales of 128 columns (int8: of rounded inputs), or of gpt-oss's in MXFP4."""
    types = bf16("x", "h", "scales", "bias", "out", "y") | {
        "weight": KINDS[kind],
        "ids": "*i32",
        "order": "*i32",
        "ends": "*i32",
    }
    types |= (
        fp32("weights", "x_scales")
        | {"limit": "fp32", "alpha": "fp32"}
        | ({"scales": "*u8"} if kind == "mxfp4" else {})
    )
    constants |= {"BIASED": kind == "mxfp4", "LIMITED": kind == "mxfp4", "ROUNDED": kind == "int8"}
    constants |= {"KIND": kind, "GROUPED": kind != "dense", "EARLY": True, "TOP_K": 8, "EVEN": True, "LISTED": False}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    divisible = [name for name in ("x_stride", "inner", "num_out", "num_in") if name in signature]
    return compile_triton(kernel, signature, constants, num_warps=warps, divisible=divisible)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_experts_stream_weights_through_shared_memory(kind: str) -> None:
    for kernel, features, columns, each in ((layers.gate_up_swiglu, 768, 2048, 2), (layers.down_visits, 2048, 768, 1)):
        shape = expert_shape(512, 128, features, columns, WIDTHS.get(kind, 128), each)
        constants = {"BLOCK": shape.block_k, "TOKENS": shape.tokens, "BLOCK_N": shape.block_n, "STAGES": shape.stages}
        record = compile_experts(kernel, kind, constants | {"BY_VISIT": False, "IDS": 512}, shape.warps)
        assert record.clean, record.line()
        assert record.count("LDGSTS") and record.count("HGMMA")


@pytest.mark.slow
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_visits_alone_load_sixteen_bytes_at_a_time(kind: str, some: bool) -> None:
    for kernel, columns, rows in ((alone.gate_up_visits, 2048, ALONE_ROWS), (alone.down_tokens, 768, 8 * ALONE_ROWS)):
        if kind == "mxfp4":  # gpt-oss's width, which no power of two divides into few steps
            columns, rows = 2880, min(rows, 4 * ALONE_ROWS)
        stored = torch.empty(1, 1, columns // 2 if STORED[kind] == torch.uint8 else columns, dtype=STORED[kind])
        scales = None if kind == "dense" else torch.empty(1, columns // WIDTHS.get(kind, 128), 1)
        scales = scales.to(torch.uint8) if scales is not None and kind == "mxfp4" else scales
        tile = tile_of(ExpertWeights(stored, scales), rows)
        more = {"BLOCK_N": ALONE_ROWS, "MASKED": some or tile["MASKED"], "BIASED": kind == "mxfp4"}
        record = compile_experts(kernel, kind, tile | more)
        assert record.spill_bytes <= 16, record.line()
        assert record.count("LDG.E.128") >= 6, record.line()


@pytest.mark.slow
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_the_choice_of_experts_stays_in_registers(copies: int) -> None:
    pointers = {
        "ids": "*i32",
        "slots": "*i32",
        "copies": "*i32",
        "key": "*i64",
        "counts": "*i64",
        "counted": "*u8",
        "logit_bias": "*bf16",
    }
    integers = dict.fromkeys(("num_tokens", "num_experts", "num_parts", "top_k"), "i32") | {"scale": "fp32"}
    constants = {
        "TOKENS": 1,
        "EXPERTS": 128,
        "TOP_K": 8,
        "SIGMOID": False,
        "NORMALIZE": True,
        "BIASED": False,
        "EARLY": True,
    }
    constants |= {"COPIES": copies, "COUNTS": copies == 3, "PADDED": copies == 3, "LOGIT_BIAS": copies == 1}
    record = compile_triton(
        choice.best_experts, fp32("parts", "bias", "weights") | pointers | integers, constants, num_warps=1
    )
    assert record.clean, record.line()


def test_bitmask() -> None:
    types = bf16("logits") | {"bitmask": "*i32", "rows": "*i64"}
    assert compile_simple(triton_bitmask.mask_rows, types, {"BLOCK": MASK_BLOCK}, 4).clean


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True])
def test_sample(filtered: bool) -> None:
    block, warps, parts = draw_shape(128256)
    types = fp32("temperature", "floors", "best", "peak") | bf16("logits")
    types |= {"keys": "*i64", "positions": "*i64", "token": "*i32"}
    for several in (1, 4):
        options = {"FILTERED": filtered, "SEEDED": True, "S": parts, "SEVERAL": several, "BLOCK": block}
        record = compile_simple(draw.draw, types, options, warps)
        assert record.clean and record.registers * 32 * warps <= 65536


@pytest.mark.slow
def test_rounds_of_speculation() -> None:
    """A sequence's round of 15 guesses, 3 deep, beside pages of 8 heads of 128."""
    names = (
        "starts",
        "alive",
        "nodes",
        "out",
        "tokens",
        "chosen",
        "limits",
        "packed",
        "path",
        "rows",
        "after",
        "draft",
        "guesses",
        "placed",
    )
    types = (
        dict.fromkeys(names, "*i64")
        | dict.fromkeys(("table", "ends", "draft_ends"), "*i32")
        | fp32("peaks")
        | bf16("store")
    )
    types |= dict.fromkeys(("stride", "num_seqs", "num_tokens", "choices"), "i32") | {"layer_stride": "i64"}
    sizes = {
        "WIDTH": 16,
        "DEPTH": 3,
        "BLOCK": 16,
        "PAGE_SIZE": 16,
        "HEADS": 8,
        "BLOCK_H": 8,
        "DIM": 128,
        "BLOCK_D": 128,
    }
    for kernel, warps in (
        (rounds.place_tokens, 1),
        (rounds.settle_round, 1),
        (rounds.leave_guesses, 1),
        (rounds.keep_path, 4),
    ):
        taken, constants = (
            {name: one for name, one in given.items() if name in kernel.arg_names} for given in (types, sizes)
        )
        assert compile_simple(kernel, taken, constants, warps).clean


@pytest.mark.slow
def test_floors() -> None:
    block, warps, _ = floor_shape(128256)
    types = fp32("temperature", "top_p", "min_p", "floor") | bf16("logits") | {"top_k": "*i32"}
    options = dict.fromkeys(("TOP_K", "TOP_P", "MIN_P"), True) | {"BLOCK": block, "STAGES": 1}
    record = compile_simple(draw.floors, types, options, warps)
    assert record.clean and record.registers * 32 * warps <= 65536


@pytest.mark.slow
def test_tables() -> None:
    types = bf16("logits") | fp32("presence", "frequency", "repetition", "out", "peaks", "masses", "values_out")
    types |= {"counts": "*i32", "rows": "*i64", "tokens_out": "*i32"}
    for kernel, constants in ((tables.penalties, {"BLOCK": 2048}), (tables.best_in_blocks, {"TOP": 20, "BLOCK": 4096})):
        taken = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        assert compile_simple(kernel, taken, constants, 8).clean
