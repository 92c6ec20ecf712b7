"""The paged kernels compile for Hopper: no spills, and keys are fetched ahead, not waited for."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from hone.ops.attention.gluon_forward import MAX_REGISTERS, PARTS, REGISTERS, tile_config
from hone.ops.compat import INTERPRETED
from hone.ops.paged import gluon_prefill
from hone.ops.paged.gluon_latent import decode_latents
from hone.ops.paged.triton_decode import decode
from hone.ops.paged.triton_launch import plan_decode
from hone.ops.paged.triton_prefill import prefill
from hone.ops.paged.triton_shared import own_rest, shared_parts, shared_tile
from tests.ops.compiled import SHARED_LIMIT, Compiled, compile_gluon, compile_triton, descriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

STRIDES = [
    "q_token",
    "q_head",
    "k_page",
    "k_head",
    "k_slot",
    "v_page",
    "v_head",
    "v_slot",
    "out_token",
    "out_head",
    "ks_page",
    "ks_head",
    "ks_slot",
    "vs_page",
    "vs_head",
    "vs_slot",
]
COUNTS = ["table_row", "num_seqs", "window", "sink_tokens"]
POINTERS = {
    "seq_lens": "*i32",
    "query_lens": "*i32",
    "table": "*i32",
    "sinks": "*fp32",
    "k_scales": "*fp32",
    "v_scales": "*fp32",
}
FLAGS = {"WINDOWED": False, "SINKS": False}


def signature(page: str, **more: str) -> dict[str, str]:
    numbers = dict.fromkeys([*STRIDES, *COUNTS], "i32")
    return {
        "q": "*bf16",
        "out": "*bf16",
        "k_pages": page,
        "v_pages": page,
        "scale": "fp32",
        **POINTERS,
        **numbers,
        **more,
    }


def shape(dim: int, page_size: int, rows: int = 64) -> dict[str, int]:
    return {"DIM": dim, "DIM_V": dim, "BLOCK_D": dim, "BLOCK_DV": dim, "PAGE_SIZE": page_size, "SEQS": rows}


def fetched_ahead(record: Compiled) -> bool:
    """Whether every wait inside the loop over blocks leaves copies of later blocks in flight."""
    loops = re.findall(r"scf\.for .*?scf\.yield", record.ttgir, flags=re.DOTALL)
    waits = [int(n) for loop in loops for n in re.findall(r"async_wait .*?num = (\d+)", loop)]
    return bool(waits) and min(waits) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "page_size", "options"),
    [
        ("*bf16", 64, {}),
        ("*bf16", 16, {"WINDOWED": True, "SINKS": True}),
        ("*bf16", 16, {"MANY": True, "TREE": True}),
        ("*i32", 64, {"INTEGER": False}),
        ("*i32", 64, {"INTEGER": True, "MANY": True}),
    ],
)
def test_decode(page, page_size, options):
    record = compile_triton(
        decode,
        signature(page, tree="*i64", part="*fp32", part_lse="*fp32", note="*i32", max_tokens="i32"),
        {**shape(128, page_size), **FLAGS, "KV": 8, "GROUP": 4, "ROPE_DIM": 0, "BLOCK_M": 16, "BLOCK_N": 64, "STAGES": 3,
         "MANY": False, "SWAP": False, "INTEGER": False, "TREE": False, "EARLY": True, **options},
        divisible=STRIDES,
        num_warps=4,
    )  # fmt: skip
    assert record.clean and fetched_ahead(record)
    assert record.count("HMMA") == 32
    assert 2 * record.shared < 227 << 10


def test_three_programs_of_many_sequences_fit_a_multiprocessor():
    many, one = (plan_decode(132, 128, 64, 2, count, 4) for count in (512, 1))
    assert (many.programs, many.stages) == (3 * 132, 2) and one.programs == 2 * 132
    assert plan_decode(132, 128, 64, 2, 512, 64) == one and plan_decode(132, 128, 64, 4, 512, 4) == one
    record = compile_triton(
        decode,
        signature("*bf16", tree="*i64", part="*fp32", part_lse="*fp32", note="*i32", max_tokens="i32"),
        {**shape(128, 64), **FLAGS, "KV": 8, "GROUP": 4, "ROPE_DIM": 0, "BLOCK_M": 16, "BLOCK_N": many.block_n,
         "STAGES": many.stages, "MANY": False, "SWAP": False, "INTEGER": False, "TREE": False, "EARLY": True},
        divisible=STRIDES,
        num_warps=many.num_warps,
    )  # fmt: skip
    assert record.clean and 3 * (record.shared + 1024) <= 228 << 10 and 3 * 128 * record.registers <= 65536, (
        record.line()
    )


def test_prefill():
    record = compile_triton(
        prefill,
        signature("*bf16", min_tokens="i32"),
        {**shape(128, 64), **FLAGS, "GROUP": 4, "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "SCALED": False},
        divisible=STRIDES,
        num_warps=4,
    )
    assert record.clean and fetched_ahead(record)
    assert record.count("HGMMA") > 0 and 2 * record.shared < 240 << 10


def test_latents_of_many_heads():
    half, turned = descriptor("bf16", [1, 64, 256]), descriptor("bf16", [1, 64, 64])
    sizes = dict.fromkeys(["table_row", "num_seqs", "heads", "out_row", "out_head"], "i32")
    tensors = {"table": "*i32", "seq_lens": "*i32", "ends": "*i32", "out": "*bf16", "note": "*i32"}
    record = compile_gluon(
        decode_latents,
        {"q_half": half, "q_rope": turned, "k_half": half, "k_rope": turned, **tensors, "part": "*fp32",
         "part_lse": "*fp32", **sizes, "scale_log2": "fp32"},
        {"TILES": 2, "PAGE_SIZE": 64},
        divisible=["out_row", "out_head"],
        maxnreg=168,
    )  # fmt: skip
    assert not record.serialized and record.shared <= SHARED_LIMIT
    # Scores of 576 columns and 256 of values in steps of 16, for each of the two warpgroups.
    assert record.count("HGMMA") == 2 * (36 + 4), record.line()
    # Addresses and bounds, a few of them in the loop; sums and weights stay in registers.
    assert record.spill_bytes < 600, record.line()


@pytest.mark.parametrize("group", [2, 4])
def test_shared_pages_are_products_of_many_rows(group: int) -> None:
    rows, block_n = shared_tile(128, group, 128)
    shape = {
        "GROUP": group,
        "DIM": 128,
        "DIM_V": 128,
        "BLOCK_D": 128,
        "BLOCK_DV": 128,
        "PAGE_SIZE": 64,
        "STAGES": 3,
        "S": 4,
    }
    types = dict.fromkeys(("q", "k_pages", "v_pages", "out"), "*bf16") | {
        "part": "*fp32",
        "part_lse": "*fp32",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("table", "seq_lens", "shared"), "*i32")
    for kernel, block_m, wide, warps in ((shared_parts, rows, block_n, 8), (own_rest, 16, 32, 4)):
        constants = {**shape, "BLOCK_M": block_m, "BLOCK_N": wide}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
        aligned = [name for name in signature if name in STRIDES]
        record = compile_triton(kernel, signature, constants, num_warps=warps, divisible=aligned)
        assert record.spill_bytes == 0 and record.shared <= SHARED_LIMIT
        assert record.count("HGMMA" if kernel is shared_parts else "HMMA") and record.count("LDGSTS")


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group", "page_size"), [(128, 4, 64), (128, 1, 256), (64, 8, 16)])
def test_prefill_in_boxes_of_pages(dim: int, group: int, page_size: int) -> None:
    config = tile_config(dim)
    rows = min(page_size, config.block_n)
    pages = descriptor("bf16", [1, 1, rows, 64])
    counts = dict.fromkeys(("num_tiles", "kv_heads", "table_row"), "i32")
    pointers = dict.fromkeys(("table", "records", "counter"), "*i32") | {"out": "*bf16", "scale_log2": "fp32"}
    queries = descriptor("bf16", [1, 64 // group, group, dim])
    types = {"q_desc": queries, "k_desc": pages, "v_desc": pages, **pointers, **counts}
    tile = {"GROUP": group, "BN": config.block_n, "D": dim, "ROWS": rows, "PAGE": page_size, "PARTS": PARTS}
    more = {"STAGES": config.stages, "Q_REG": config.q_in_registers, "REGS": REGISTERS, "TURNS": config.turns}
    record = compile_gluon(gluon_prefill.paged_forward, types, {**tile, **more, "NUMBERS": 8}, maxnreg=MAX_REGISTERS)
    assert record.clean and not record.count("HMMA"), record.line()
    # Every step, and every way from one tile to the next, has a product under way while it waits for the one before.
    assert record.waits().count(1) >= 2 * 2, record.line()
