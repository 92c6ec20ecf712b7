"""The product kernels compile for Hopper: wgmma from registers or shared memory, no spills, no byte shuffling of codes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from hone.ops.linear.gluon_gated import SPAN, STAGES, STEP, WIDTH, gated_product
from hone.ops.linear.gluon_quantized import max_registers, w4_stream
from hone.ops.linear.gluon_sparse import max_registers as sparse_registers
from hone.ops.linear.gluon_sparse import sparse_stream
from hone.ops.linear.shapes import QuantizedShape, fp8_shape, quantized_shape, skinny_shape, sparse_shape
from hone.ops.linear.triton_codes import row_codes
from hone.ops.linear.triton_fp8 import fp8_product
from hone.ops.linear.triton_skinny import skinny
from hone.ops.moe.gluon_grouped import MAX_REGISTERS, REGISTERS
from tests.ops.compiled import compile_gluon, compile_triton, descriptor

PLAIN = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
SIZE = (14336, 4096)


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
def test_skinny(rows: int) -> None:
    shape = skinny_shape(rows, *SIZE)
    record = compile_triton(
        skinny,
        dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
        | integers("M N K stride_x stride_weight stride_out stride_part"),
        {
            "BLOCK_N": shape.block_n, "BLOCK_M": shape.block_m, "BLOCK_K": shape.block_k, "WHOLE_K": True,
            "HAS_BIAS": False, "EARLY": True, "AHEAD": 4, "SOON": False, "STAGES": shape.stages,
        },
        num_warps=shape.warps, num_stages=shape.stages,
        divisible=("N", "K", "stride_x", "stride_weight", "stride_out"),
    )  # fmt: skip
    assert record.clean, record.line()
    assert record.count("HGMMA") and record.count("LDGSTS") and not record.count("LDSM"), record.line()
    assert 0 not in record.waits()[:-1], "the loop leaves a product in flight"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gated(dtype: str) -> None:
    record = compile_gluon(
        gated_product,
        {
            "x_desc": descriptor(dtype, [64, STEP]),
            "w_desc": descriptor(dtype, [WIDTH, STEP]),
            "out_desc": descriptor(dtype, [64, WIDTH]),
        }
        | integers("num_rows num_features steps F"),
        {"STAGES": STAGES, "SPAN": SPAN, "REGS": REGISTERS},
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        divisible=("F",),
    )
    assert record.clean, record.line()
    assert record.count("HGMMA") == 8 and record.count("UTMALDG") == 4 and record.count("UTMASTG") == 2, record.line()
    assert 1 in record.waits(), "the loop leaves a product in flight"


def compiled(shape: QuantizedShape, bits: int, group: int, dtype: str = "bf16"):
    scales_box = [max(1, 64 * shape.chunks // group) if group else 1, 32 * shape.tiles]
    signature = {
        "x_desc": descriptor(dtype, [shape.chunks, shape.block_m, 64]),
        "codes_desc": descriptor("i32", [bits // 2 * shape.chunks, 256], PLAIN),
        "scales_desc": descriptor("i32", scales_box, PLAIN) if group else "*bf16",
        "scales": "*bf16",
        "bias": "*bf16",
        "out": f"*{dtype}",
    }
    constants = {
        "BITS": bits, "CHUNKS": shape.chunks, "STAGES": shape.stages, "GROUP": group, "TILES": shape.tiles,
        "FOLD": shape.fold, "HAS_BIAS": False, "EARLY": shape.early, "SOON": shape.soon,
    }  # fmt: skip
    return compile_gluon(
        w4_stream,
        signature | integers("M N K stride_out stride_part"),
        constants,
        num_warps=4 * shape.tiles,
        maxnreg=max_registers(shape),
        divisible=("N", "K", "stride_out"),
    )


def assert_products(record, shape: QuantizedShape) -> None:
    """Few rows of x: mma.sync, eight rows at a time, x by ldmatrix. More: wgmma."""
    synced = shape.block_m <= 16
    assert record.count("HGMMA") == (0 if synced else 4 * shape.chunks), record.line()
    assert record.count("HMMA") == (shape.block_m // 8 * 4 * shape.chunks if synced else 0), record.line()
    assert bool(record.count("LDSM")) == synced, record.line()


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "group"), [(1, 128), (16, 0), (64, 32), (256, 128)])
def test_four_bits(rows: int, group: int) -> None:
    shape = quantized_shape(rows, *SIZE, 4, group)
    record = compiled(shape, 4, group)
    assert record.clean, record.line()
    # Four words a chunk and thread, eight codes a word: a mask for two codes, three shifts a word, and nothing else.
    synced = shape.block_m <= 16
    # A stage's, and with scaled weights and asynchronous products the first chunk's before the loop.
    words = 4 * (shape.chunks + (not shape.fold and not synced))
    assert_products(record, shape)
    assert 4 * words <= record.count("LOP3") <= 5 * words + 16, record.line()
    assert record.count("PRMT") <= 24 + shape.block_m, record.line()  # scales, and pairs of outputs
    weights_scaled = 4 * words if group and not shape.fold else 0
    assert record.count("HMUL2") <= weights_scaled + 8, record.line()
    assert record.count("LDG") == (2 if group == 0 else 0), "all but a row's scale comes through shared memory"
    assert shape.fold or synced or 1 in record.waits(), "no product is under way while weights are made"


def test_outputs_beyond_two_to_the_31_have_their_places() -> None:
    """16384 rows of a head's 150 000 outputs: no place is a product of 32 bits, where it would be negative."""
    record = compiled(quantized_shape(16384, *SIZE, 4, 128), 4, 128)
    placed = [line for line in record.ttgir.splitlines() if "muli" in line and "tensor<" in line]
    assert placed and all("xi64" in line for line in placed), placed


@pytest.mark.parametrize(("dtype", "group"), [("bf16", 128), ("fp16", 32)])
def test_eight_bits(dtype: str, group: int) -> None:
    shape = quantized_shape(16, *SIZE, 8, group)
    record = compiled(shape, 8, group, dtype)
    assert record.clean, record.line()
    assert_products(record, shape)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_two_of_four(rows: int) -> None:
    shape = sparse_shape(rows, *SIZE)
    synced = shape.block_m <= 32
    signature = {
        "x_desc": descriptor("bf16", [4, shape.block_m, 32], NVMMASharedLayout(64, 16, 3)),
        "pairs_desc": descriptor("i32", [shape.block_n, 32], NVMMASharedLayout(128, 32, 2)),
        "masks_desc": descriptor("u8", [shape.block_n, 32], NVMMASharedLayout(32, 8, 2)),
        "bias": "*bf16",
        "out": "*bf16",
    }
    record = compile_gluon(
        sparse_stream,
        signature | integers("M N K stride_out stride_part"),
        {"STAGES": shape.stages, "SYNCED": synced, "HAS_BIAS": False, "EARLY": True},
        num_warps=shape.block_n // 16,
        maxnreg=sparse_registers(shape),
        divisible=("N", "K", "stride_out"),
    )
    assert record.clean, record.line()
    # 64 groups a row and step: four products of 16 groups and eight (or, by wgmma, all) rows of x for each place in a group.
    assert record.count("HMMA") == (16 * shape.block_m // 8 if synced else 0), record.line()
    assert record.count("HGMMA") == (0 if synced else 16), record.line()
    assert record.count("STS") <= 4, "the weight goes from its load to its product without shared memory"
    # 32 groups a thread: 17 operations on registers of two groups, of which four shifts may be multiplications.
    assert record.count("PRMT") + record.count("LOP3") <= 16 * 17 + 48, record.line()


@pytest.mark.parametrize("kind", ["fp8 rows", "fp8 blocks", "int8"])
def test_fp8(kind: str) -> None:
    blockwise, integer = kind == "fp8 blocks", kind == "int8"
    code = "*i8" if integer else "*fp8e4nv"
    shape = fp8_shape(16, *SIZE, blockwise=blockwise)
    record = compile_triton(
        fp8_product,
        {"x": code, "x_scales": "*fp32", "weight": code, "weight_scales": "*fp32", "bias": "*bf16", "out": "*bf16"}
        | integers("M N K stride_x stride_xs stride_weight stride_ws stride_out stride_part"),
        {
            "BLOCK_N": shape.block_n, "BLOCK_M": shape.block_m, "BLOCKWISE": blockwise, "HAS_BIAS": False,
            "EARLY": shape.parts > 1, "STAGES": shape.stages, "INTEGER": integer,
        },
        num_warps=shape.warps, num_stages=shape.stages,
        divisible=("N", "K", "stride_x", "stride_weight", "stride_out"),
    )  # fmt: skip
    assert record.clean and (integer or record.count("QGMMA") == 4), record.line()  # 128 columns, then a fresh sum


@pytest.mark.parametrize("code", ["*i8", "*fp8e4nv"])
@pytest.mark.parametrize("fixed", [False, True])
def test_input_codes(code: str, fixed: bool) -> None:
    types = {
        "x": "*bf16",
        "fixed": "*fp32",
        "codes": code,
        "scales": "*fp32",
        "low": "fp32",
        "high": "fp32",
        "span": "fp32",
    }
    record = compile_triton(
        row_codes, types | integers("stride_x K width"), {"FIXED": fixed, "BLOCK": 4096}, num_warps=8, num_stages=1,
        divisible=("stride_x", "K", "width"),
    )  # fmt: skip
    assert record.clean


def test_the_kernels_are_torch_ops_that_know_their_outputs() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    import hone.ops.linear.api  # noqa: F401  (registers them)

    with FakeTensorMode():
        x, weight = torch.empty(2, 3, 256, dtype=torch.bfloat16), torch.empty(96, 256, dtype=torch.bfloat16)
        assert torch.ops.hone.skinny_linear(x, weight, None).shape == (2, 3, 96)
        codes, scales = torch.empty(2, 4, 128, 4, dtype=torch.int32), torch.empty(2, 8, 8, 2, dtype=torch.bfloat16)
        assert torch.ops.hone.quantized_linear(x, codes, scales, None, 4, 96).shape == (2, 3, 96)
        fp8, ones = torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.empty(5)
        made = torch.ops.hone.fp8_linear(fp8, ones, fp8, ones, None, torch.float16)
        assert made.shape == (5, 5) and made.dtype == torch.float16
