"""The Triton attention kernels compiled for Hopper: asynchronous products, loads by descriptor, nothing spilled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hone.ops.attention import triton_backward as flash_backward
from hone.ops.attention import triton_forward as flash
from tests.ops.compiled import Compiled, compile_triton

CAUSAL, LISTS = 1, 2
NUMBERS = {"num_heads": "i32", "seq_q": "i32", "seq_k": "i32", "scale": "fp32"}
LIST_TYPES = dict.fromkeys(("count", "index", "partial", "q_data", "k_data"), "*i32") | {"strides": ("i32",) * 6}


def documents(q, k, q_data, k_data, params):
    return (q >= k) & (q - k < params[0]) & (q_data == k_data)


def boxes(name: str, rows: int, width: int) -> dict[str, str]:
    first, second = flash.pieces(width)
    return {
        f"{name}_desc": f"tensordesc<bf16[1, {rows}, 1, {first}]>",
        f"{name}_rest": f"tensordesc<bf16[1, {rows}, 1, {second or first}]>",
    }


def mask_constants(kind: int) -> dict:
    import triton

    return {
        "KIND": kind,
        "RULE": triton.jit(documents),
        "PARAMS": (100,),
        "Q_DATA": kind == LISTS,
        "K_DATA": kind == LISTS,
    }


def forward(width: int, kind: int) -> Compiled:
    block_m, block_n = flash.tile_shape(width, width)
    first, second = flash.pieces(width)
    types = boxes("q", block_m, width) | boxes("k", block_n, width) | boxes("v", block_n, width) | NUMBERS | LIST_TYPES
    types |= {"out": "*bf16", "lse": "*fp32", "out_b": "i32", "out_s": "i32", "out_h": "i32"}
    constants = {
        "GROUP": 4,
        "D1": second,
        "V0": first,
        "V1": second,
        "V": width,
        "BM": block_m,
        "BN": block_n,
        "CAP": None,
    }
    return compile_triton(
        flash._forward_kernel,
        types,
        constants | mask_constants(kind),
        divisible=["out_b", "out_s", "out_h"],
        **flash._LAUNCH,
    )


def backward(part: str, width: int, kind: int) -> Compiled:
    block_m, block_n = flash_backward.tile_shape(width, width)
    first, second = flash.pieces(width)
    types = boxes("q", block_m, width) | boxes("k", block_n, width) | boxes("v", block_n, width) | NUMBERS | LIST_TYPES
    types |= boxes("d", block_m, width) | {"lse": "*fp32", "delta": "*fp32"}
    types |= {"dq": "*bf16"} if part == "dq" else {"dk": "*bf16", "dv": "*bf16"}
    constants = {"GROUP": 4, "D0": first, "D1": second, "D": width, "V0": first, "V1": second, "V": width}
    constants |= {"BM": block_m, "BN": block_n, "CAP": None} | mask_constants(kind)
    constants["AGAIN"] = flash_backward.reads_again(width, width)[part]
    kernel = flash_backward._dq_kernel if part == "dq" else flash_backward._dkdv_kernel
    return compile_triton(kernel, types, constants, **flash_backward.launch_options(width, width, block_n))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "kind"), [(128, CAUSAL), (128, LISTS), (192, CAUSAL)])
def test_forward(width: int, kind: int) -> None:
    record = forward(width, kind)
    assert record.clean, record.line()
    assert record.count("HGMMA") > 0 and record.count("HMMA") == 0
    assert record.count("UTMALDG") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "width", "kind", "spills"),
    [
        ("dq", 128, CAUSAL, 0),
        ("dq", 256, LISTS, 600),
        # Measured on an H200 the small program that spills some is faster than larger ones that do not.
        ("dkdv", 128, LISTS, 600),
        ("dkdv", 256, CAUSAL, 2200),
    ],
)
def test_backward(part: str, width: int, kind: int, spills: int) -> None:
    record = backward(part, width, kind)
    assert record.spill_bytes <= spills, record.line()
    assert record.count("HGMMA") > 0 and record.count("HMMA") == 0
