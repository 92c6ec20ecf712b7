"""The kernels for blocks of 128 in Triton's interpreter against the reference: ragged sizes, every tile, nothing left unwritten.

On numbers that eight bits hold, as in `interpreted.py`; sums of them are exact in float32, so products are compared bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops.fp8 import blocks, triton_blocks

E4M3 = torch.float8_e4m3fn


def uneven(rows: int, columns: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-7, 8, (rows, columns), generator=draw).float()
    x = torch.where(x.abs() < 4, 0.0, x) * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=draw).float())
    x[rows // 2], x[:, columns // 3] = 0.0, 0.0
    return x


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(144, 208), (16, 128), (256, 272)])
def test_codes_are_those_of_the_reference(square: bool, rows: int, columns: int):
    x = uneven(rows, columns, rows)
    made = triton_blocks.cast(x, E4M3, square=square, rows=True, columns=True)
    for turned in (False, True):
        codes, scales = blocks.block_codes(x, E4M3, square=square, columns=turned)
        assert torch.equal(made[2 * turned].float(), codes.float())
        assert torch.equal(made[2 * turned + 1], scales)
    codes, scales, codes_t, _ = triton_blocks.cast(x, E4M3, square=square, rows=False, columns=True)
    assert not codes.numel() and not scales.numel() and torch.equal(codes_t.float(), made[2].float())


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("rows", "features", "width"), [(144, 208, 272), (16, 144, 128), (272, 128, 256)])
def test_products_are_those_of_the_reference(square: bool, rows: int, features: int, width: int):
    a = blocks.block_codes(uneven(rows, width, 1), E4M3, square=False, columns=False)
    b = blocks.block_codes(uneven(features, width, 2), E4M3, square=square, columns=False)
    bias = torch.randint(-9, 9, (features,)).float()
    wanted = blocks.block_product(*a, *b, bias, torch.float32, square=square)
    for tile in triton_blocks.TILES:
        assert torch.equal(triton_blocks.product(*a, *b, bias, torch.float32, square=square, tile=tile), wanted)
    plain = triton_blocks.product(*a, *b, None, torch.float32, square=square, tile=triton_blocks.TILES[2])
    assert torch.equal(plain, wanted - bias)
