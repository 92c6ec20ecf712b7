"""The paged kernels compile for Hopper: no spills, and keys are fetched ahead, not waited for."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from hone.ops.compat import INTERPRETED
from hone.ops.paged.gluon_latent import decode_latents
from hone.ops.paged.triton_decode import decode
from hone.ops.paged.triton_prefill import prefill
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
        ("*i32", 64, {"INTEGER": False}),
        ("*i32", 64, {"INTEGER": True, "MANY": True}),
    ],
)
def test_decode(page, page_size, options):
    record = compile_triton(
        decode,
        signature(page, part="*fp32", part_lse="*fp32", note="*i32", max_tokens="i32"),
        {**shape(128, page_size), **FLAGS, "KV": 8, "GROUP": 4, "ROPE_DIM": 0, "BLOCK_M": 16, "BLOCK_N": 64, "STAGES": 3,
         "MANY": False, "SWAP": False, "INTEGER": False, "EARLY": True, **options},
        divisible=STRIDES,
        num_warps=4,
    )  # fmt: skip
    assert record.clean and fetched_ahead(record)
    assert record.count("HMMA") == 32
    assert 2 * record.shared < 227 << 10


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
