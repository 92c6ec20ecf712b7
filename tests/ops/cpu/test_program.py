"""Compiled CPU kernels against float64: products of every format, attention over pages, gates, norms and rotations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hone.ops import attend_paged, linear, quantized_linear
from hone.ops.cpu.isa import ISAS, best_isa, cpu_isa
from hone.ops.cpu.program import Program, scratch_bytes
from hone.ops.cpu.rules import FEW_ROWS
from hone.ops.dispatch import Where, choose
from hone.ops.linear.cpu_product import unpacked
from hone.ops.linear.cpu_weights import (
    CpuWeight,
    block_weight,
    byte_weight,
    dense_weight,
    pack_blocks,
    unpack_blocks,
)

F64 = torch.float64
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
]
SHAPES = [(1, 37, 160), (3, 66, 256), (8, 5, 2048), (11, 130, 416), (FEW_ROWS, 16, 32)]

compiled = pytest.mark.skipif(not cpu_isa(), reason="no vector instructions that there are compiled kernels for")


def weights(features: int, columns: int, dtype: torch.dtype) -> list[tuple[str, CpuWeight, Tensor]]:
    """(format, weight, the same in float64) of random weights with a bias."""
    bias = torch.randn(features)
    dense = torch.randn(features, columns).to(dtype)
    bytes_, nibbles = (torch.randint(-high, high, (features, columns), dtype=torch.int8) for high in (128, 8))
    rows, small = torch.rand(features, 1) + 0.1, torch.rand(features, columns // 32) + 0.1
    found = [
        ("dense", dense_weight(dense, bias), dense.double()),
        ("i8", byte_weight(bytes_, rows, bias), bytes_ * rows.double()),
        ("i8g", byte_weight(bytes_, small, bias), bytes_ * small.double().repeat_interleave(32, 1)),
        ("i4", block_weight(pack_blocks(nibbles), rows, columns, bias), nibbles * rows.double()),
        (
            "i4s",
            block_weight(pack_blocks(nibbles), small, columns, bias),
            nibbles * small.double().repeat_interleave(32, 1),
        ),
    ]
    if columns % 256 == 0:
        wide = small[:, ::8].contiguous()
        weight = block_weight(pack_blocks(nibbles), wide, columns, bias)
        found.append(("i4", weight, nibbles * wide.double().repeat_interleave(256, 1)))
    return found


def in_16_bits(x: Tensor) -> Tensor:
    """x as products of codes see it: integers up to 32639 times a scale for each row."""
    top = x.double().abs().amax(1, keepdim=True)
    return (x.float() * (32639 / top).float()).round().double() * (top / 32639)


def check_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, features, columns in SHAPES:
        x = torch.randn(rows, columns).to(dtype)
        program, outs = Program(dtype, rows), []
        for stored, weight, exact in weights(features, columns, dtype):
            operand, out = program.operand(weight.columns), program.floats(features).fill_(float("nan"))
            program.load_operand(x, operand)
            program.product(operand, weight, out)
            last = operand, weight
            seen = x.double() if stored == "dense" else in_16_bits(x)
            outs.append((stored, out, seen @ exact.T + weight.bias))
        onto = program.floats(features).fill_(1.0)
        program.product(*last, onto, onto=True)
        program.run(rows)
        for stored, out, exact in outs:
            assert (out - exact).abs().max() <= 2e-6 * exact.abs().max() + 1e-5, (stored, rows, features, columns)
        assert torch.allclose(onto, outs[-1][1] + 1.0, atol=1e-3)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_every_format_equal_float64(dtype: torch.dtype) -> None:
    check_products(dtype)


def paged_case(dtype: torch.dtype, kv_heads: int, dim: int) -> dict[str, Tensor]:
    """Three sequences of 1, 37 and 600 tokens in shuffled pages of 16; slots that no token has hold NaN."""
    ends = torch.tensor([1, 37, 600], dtype=torch.int32)
    places = torch.randperm(60) + 1
    table = torch.zeros(3, 38, dtype=torch.int32)
    pages = [torch.full((61, kv_heads, 16, dim), float("nan"), dtype=dtype) for _ in range(2)]
    begin = 0
    for row, end in enumerate(ends.tolist()):
        count = -(-end // 16)
        table[row, :count] = places[begin : begin + count]
        for place in range(end):
            for one in pages:
                one[table[row, place // 16], :, place % 16] = torch.randn(kv_heads, dim).to(dtype)
        begin += count
    return {"k_pages": pages[0], "v_pages": pages[1], "page_table": table, "seq_lens": ends}


def attended(q: Tensor, case: dict[str, Tensor], scale: float, window: int | None) -> Tensor:
    """The same in float64, a head at a time."""
    out = torch.empty(q.shape, dtype=F64)
    group = q.shape[1] // case["k_pages"].shape[1]
    for row, end in enumerate(case["seq_lens"].tolist()):
        ids = case["page_table"][row, : -(-end // 16)].long()
        keys, values = (case[name][ids].double().transpose(1, 2).flatten(0, 1)[:end] for name in ("k_pages", "v_pages"))
        begin = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            scores = keys[begin:, head // group] @ q[row, head].double() * scale
            out[row, head] = scores.softmax(0) @ values[begin:, head // group]
    return out


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_pages_equals_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # In groups of 11 heads 8, 2 and 1 go together. 16 bits are compiled at either width, each width being seconds.
    heads, dim = {torch.float32: (4, 64), torch.bfloat16: (22, 64), torch.float16: (22, 32)}[dtype]
    case, q = paged_case(dtype, 2, dim), torch.randn(3, heads, dim).to(dtype)
    for window in (None, 100):
        found = attend_paged(q, **case, scale=0.3, window=window, backend="compiled")
        exact = attended(q, case, 0.3, window)
        bound = 2e-5 if dtype == torch.float32 else 1e-2
        assert (found - exact).abs().max() < bound


@compiled
def test_norm_rotation_and_gate_equal_torch() -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads, dim, size = 3, 2, 1, 64, 96
    program = Program(torch.float32, rows, scratch_bytes(dim))
    x, weight, normed = torch.randn(rows, size), torch.randn(size), program.operand(size)
    program.norm(x, weight, 1e-5, normed)
    gate_up, gated = torch.randn(rows, 2 * 528) * 30, program.operand(528)
    program.gate(gate_up, gated, 528)
    qkv, q = torch.randn(rows, (heads + 2 * kv_heads) * dim), program.operand(heads * dim)
    cos, sin = torch.rand(10, dim // 2), torch.rand(10, dim // 2)
    q_norm, k_norm = torch.rand(dim), torch.rand(dim)
    pages = (torch.full((4, kv_heads, 8, dim), float("nan")), torch.full((4, kv_heads, 8, dim), float("nan")))
    program.rope(qkv, q, (heads, kv_heads, dim), (cos, sin), pages, (q_norm, k_norm), 1e-5)
    positions, page, offset = torch.tensor([[9, 0, 4], [1, 3, 2], [7, 0, 5]])
    nothing = torch.zeros(3, 1, dtype=torch.int32)
    program.run(rows, (positions, page, offset, nothing[:, 0], nothing))

    def rms(y: Tensor, by: Tensor) -> Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * by

    def turned(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        c, s = cos[positions, None], sin[positions, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    gate, up = gate_up.double().chunk(2, -1)
    assert torch.allclose(normed, rms(x, weight), atol=1e-5)
    assert torch.allclose(gated.double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-6)
    split = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    assert torch.allclose(q.view(rows, heads, dim), turned(rms(split[0], q_norm)), atol=1e-5)
    assert torch.allclose(pages[0][page, :, offset], turned(rms(split[1], k_norm)), atol=1e-5)
    assert torch.equal(pages[1][page, :, offset], split[2])
    assert pages[0].isnan().sum() == pages[0].numel() - rows * kv_heads * dim, "nothing else is written"


@compiled
@pytest.mark.slow
def test_linear_and_quantized_linear_take_the_kernel() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 256), torch.randn(300, 256), torch.randn(300)
    exact = x.double() @ weight.double().T + bias
    assert torch.allclose(linear(x, weight, bias, backend="compiled").double(), exact, atol=1e-3)
    codes, scales = torch.randint(-8, 8, (300, 256), dtype=torch.int8), torch.rand(300, 4) + 0.1
    seen = in_16_bits(x.flatten(0, 1)).view(x.shape)
    exact = seen @ (codes * scales.double().repeat_interleave(64, 1)).T
    for bits in (4, 8):
        found = quantized_linear(x, codes, scales, bits=bits, backend="compiled")
        assert torch.allclose(found.double(), exact, atol=1e-3), bits


@compiled
def test_blocks_of_codes_come_back_and_unpack() -> None:
    torch.manual_seed(0)
    for columns in (64, 128, 416):
        codes, scales = torch.randint(-8, 8, (37, columns), dtype=torch.int8), torch.rand(37, columns // 32)
        blocks = pack_blocks(codes)
        assert torch.equal(unpack_blocks(blocks, 37, columns), codes)
        found = unpacked(block_weight(blocks, scales, columns, None), slice(4, 37), torch.float32)
        assert torch.equal(found, (codes * scales.repeat_interleave(32, 1))[4:])


LINEAR = {"dtype": torch.float32, "rows": 4, "out_features": 512, "in_features": 512, "in_rows": True, "plain": True}
CODES = {
    "dtype": torch.bfloat16,
    "rows": 4,
    "bits": 4,
    "group_size": 128,
    "in_features": 512,
    "tiled": False,
    "plain": True,
}
PAGED = {"dtype": torch.bfloat16, "page_dtype": torch.bfloat16, "head_dim": 64, "v_dim": 64, "rows": 4, "decode": True}


@pytest.mark.parametrize(
    ("op", "isa", "change", "backend", "says"),
    [
        ("linear", "avx2", {}, "compiled", "reading the weight"),
        ("linear", "avx2", {"rows": FEW_ROWS + 1}, "reference", "33 rows"),
        ("linear", "avx2", {"plain": False}, "reference", "gradient"),
        ("linear", "avx2", {"in_rows": False}, "reference", "rows"),
        ("linear", "avx2", {"dtype": F64}, "reference", "16 or 32 bits"),
        ("linear", "avx2", {"in_features": 520}, "reference", "no multiple of 16"),
        ("linear", "avx512_bf16", {"in_features": 528, "dtype": torch.bfloat16}, "reference", "no multiple of 32"),
        ("linear", "", {}, "reference", "no GPU"),
        ("quantized_linear", "avx2", {}, "compiled", "in 16 bits"),
        ("quantized_linear", "avx2", {"bits": 3}, "reference", "3 bits"),
        ("quantized_linear", "avx2", {"group_size": 16}, "reference", "groups of 16"),
        ("quantized_linear", "avx2", {"rows": 64}, "reference", "unpacked"),
        ("quantized_linear", "avx2", {"tiled": True}, "reference", "plain codes"),
        ("attend_paged", "avx2", {}, "compiled", "in place"),
        ("attend_paged", "avx2", {"decode": False}, "reference", "no GPU"),
        ("attend_paged", "avx2", {"page_dtype": torch.int8}, "reference", "one dtype"),
        ("attend_paged", "avx2", {"head_dim": 48, "v_dim": 48}, "reference", "multiples of 32"),
    ],
)  # fmt: skip
def test_choice(op: str, isa: str, change: dict, backend: str, says: str) -> None:
    case = {"linear": LINEAR, "quantized_linear": CODES, "attend_paged": PAGED}[op]
    choice = choose(op, Where("cpu", cpu=isa), **{**case, **change})
    assert choice.backend == backend and says in choice.reason


def test_the_best_instructions_are_found() -> None:
    fast = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
    assert [best_isa(fast), best_isa(fast - {"avx512_bf16"}), best_isa(fast - {"avx512vl"})] == list(ISAS)
    assert best_isa({"sse4_2", "avx2"}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS[1:])
def test_lesser_instructions_give_the_same_numbers(isa: str) -> None:
    if not cpu_isa() or ISAS.index(isa) <= ISAS.index(cpu_isa()):
        pytest.skip(f"this machine has {cpu_isa() or 'none of them'}")
    code = f"""
import torch
from tests.ops.cpu.test_program import check_products, cpu_isa
assert cpu_isa() == "{isa}"
for dtype in (torch.bfloat16, torch.float16):
    check_products(dtype)
"""
    features = "-avx512f,-avx512bw,-avx512vl,-avx512dq" if isa == "avx2" else ""
    extra = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2"} if features else {}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HONE_CPU_ISA": isa, **extra})
