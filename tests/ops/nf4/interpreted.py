"""The dequantizing kernel in the interpreter against plain torch, bit for bit: both multiply and add in float32."""

from __future__ import annotations

import pytest
import torch

from hone.ops import dequantize_nf4
from hone.ops.nf4.reference import Nested, dynamic_map


@pytest.mark.parametrize("number", ["nf4", "fp4"])
@pytest.mark.parametrize("columns", [64, 192])
@pytest.mark.parametrize("first", [None, 0, 250])
def test_dequantized_weights(number: str, columns: int, first: int | None) -> None:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (50, columns // 2), dtype=torch.uint8, generator=generator)
    if first is None:
        scales, nested = torch.rand(50, columns // 32, generator=generator), None
    else:
        scales = torch.randint(0, 256, (50, columns // 32), dtype=torch.uint8, generator=generator)
        outer, offsets = torch.rand(2, 3, generator=generator)
        nested = Nested(dynamic_map(), outer, offsets, first)
    for dtype in (torch.float32, torch.float16):
        ours, plain = (
            dequantize_nf4(codes, scales, dtype, number=number, nested=nested, backend=backend)
            for backend in ("triton", "reference")
        )
        assert torch.equal(ours, plain)
