"""NF4 against its definition in float64, one weight at a time."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import choose, dequantize_nf4
from hone.ops.nf4.reference import Nested, dynamic_map, quantize, table
from hone.ops.where import Where


def test_both_levels_of_scales_begin_at_the_block_given() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (9, 64), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (9, 2), dtype=torch.uint8, generator=generator)
    nested = Nested(dynamic_map(), torch.tensor([2.0, 3.0]), torch.tensor([10.0, 20.0]), first=250)
    found = dequantize_nf4(codes, scales, torch.float64, nested=nested)
    values = table("nf4", torch.device("cpu")).tolist()
    for row in range(9):
        for column in range(128):
            byte = int(codes[row, column // 2])
            block = row * 2 + column // 64
            group = (250 + block) // 256
            scale = dynamic_map()[int(scales[row, column // 64])] * (2.0, 3.0)[group] + (10.0, 20.0)[group]
            assert found[row, column] == values[byte % 16 if column % 2 else byte // 16] * scale.double()


def test_a_matrix_in_tiles_is_quantized_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weights, "nf4", 64)
    monkeypatch.setattr("hone.ops.nf4.reference.TILE_VALUES", 1000)
    again, same = quantize(weights, "nf4", 64)
    assert torch.equal(codes, again) and torch.equal(scales, same)
    packed = ((codes[:, 0::2] + 8) << 4 | (codes[:, 1::2] + 8)).view(torch.uint8)
    error = dequantize_nf4(packed, scales, torch.float32) - weights
    assert 0.085 < error.norm() / weights.norm() < 0.1  # 9.2 % on Gaussian weights (arXiv:2305.14314's format)


def test_tensors_that_do_not_fit_are_named() -> None:
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(SpecError, match=r"scales torch.uint8 \(4, 1\) do not fit"):
        dequantize_nf4(codes, torch.zeros(4, 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(SpecError, match=r"codes torch.int8"):
        dequantize_nf4(codes.view(torch.int8), torch.zeros(4, 1), torch.float32)


def test_which_backend_runs() -> None:
    hopper = Where("cuda", (9, 0), 132, (3, 6))
    assert choose("dequantize_nf4", hopper, dtype=torch.bfloat16, width=64).backend == "triton"
    assert choose("dequantize_nf4", hopper, dtype=torch.bfloat16, width=12).backend == "reference"
    assert choose("dequantize_nf4", hopper, dtype=torch.float64, width=64).backend == "reference"
    assert choose("dequantize_nf4", Where("cpu"), dtype=torch.bfloat16, width=64).backend == "reference"
