"""Packing against compressed-tensors' own packer, a big-integer oracle and itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops import formats


def bitstream(codes: list[int], bits: int) -> list[int]:
    """The words of one row by the definition: one long integer, cut every 32 bits."""
    number = 0
    for position, code in enumerate(codes):
        number |= (code + (1 << (bits - 1))) << (position * bits)
    return [(number >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(codes) * bits // 32))]


def random_codes(rows: int, columns: int, bits: int, seed: int = 0) -> torch.Tensor:
    low, high = formats.code_range(bits)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (rows, columns), generator=generator, dtype=torch.int8)


@settings(max_examples=60)
@given(bits=st.integers(2, 8), columns=st.integers(1, 150), rows=st.integers(1, 4), seed=st.integers(0, 9))
def test_packing_is_the_bitstream_of_its_definition(bits: int, columns: int, rows: int, seed: int) -> None:
    codes = random_codes(rows, columns, bits, seed)
    packed = formats.pack(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (rows, formats.num_words(columns, bits))
    assert [[word & 0xFFFFFFFF for word in row] for row in packed.tolist()] == [
        bitstream(row, bits) for row in codes.tolist()
    ]
    assert torch.equal(formats.unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [32, 64, 77, 96, 160])
def test_packing_is_bit_identical_to_compressed_tensors(bits: int, columns: int) -> None:
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(5, columns, bits)
    packed = formats.pack(codes, bits)
    assert torch.equal(packed, theirs.pack_to_int32(codes, bits))
    assert torch.equal(formats.unpack(packed, bits, columns), theirs.unpack_from_int32(packed, bits, codes.shape))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_extreme_codes_survive(bits: int) -> None:
    low, high = formats.code_range(bits)
    for value in (low, high, 0, -1):
        codes = torch.full((2, 40), value, dtype=torch.int8)
        assert torch.equal(formats.unpack(formats.pack(codes, bits), bits, 40), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_quantize_takes_the_nearest_grid_point(bits: int, sign: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(6, 32, generator=generator, dtype=torch.float64)
    scales = sign * (torch.rand(6, 4, generator=generator, dtype=torch.float64) * 0.2 + 0.05)
    codes = formats.quantize(weights, scales, bits)
    low, high = formats.code_range(bits)
    grid = torch.arange(low, high + 1, dtype=torch.float64)
    candidates = grid * scales.repeat_interleave(8, dim=1).unsqueeze(-1)
    best = (weights.unsqueeze(-1) - candidates).abs().min(dim=-1).values
    error = (weights - formats.dequantize(codes, scales, torch.float64)).abs()
    assert torch.allclose(error, best, atol=1e-12)


def test_dequantize_is_exact_in_the_working_dtype() -> None:
    codes = random_codes(3, 64, 4)
    scales = torch.tensor([[0.25, -0.5]] * 3, dtype=torch.bfloat16)
    weights = formats.dequantize(codes, scales, torch.float32)
    assert torch.equal(weights[:, :32], codes[:, :32].float() * 0.25)
    assert torch.equal(weights[:, 32:], codes[:, 32:].float() * -0.5)
