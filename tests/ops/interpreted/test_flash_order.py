"""The order in which the attention forward goes through listed tiles: every tile once, far longer ones first, then backwards."""

from __future__ import annotations

import pytest
import torch

from hone.ops.gluon.flash_order import LONG, ordered
from hone.ops.masks import Tiles


@pytest.mark.parametrize("shape", [(1, 1, 128, 40), (2, 3, 150, 7), (1, 2, 5, 900)])
def test_turns(shape: tuple[int, int, int, int]) -> None:
    count = torch.randint(0, 4, shape[:3], dtype=torch.int32)
    count[..., ::50] = torch.randint(shape[3] // 2, shape[3], count[..., ::50].shape, dtype=torch.int32)
    count[0, -1] = 0  # sees nothing at all
    index = torch.randint(0, 1 << 20, shape, dtype=torch.int32)
    partial = torch.randint(0, 1 << 20, shape[:3], dtype=torch.int32)
    tiles = Tiles("", (), None, None, False, False, 1, 1, 128, 128, count, index, partial)
    counter, records = ordered(tiles)
    assert counter[0] == 0
    for b in range(shape[0]):
        for h in range(shape[1]):
            lengths = count[b, h].tolist()
            longest = LONG.value * sum(lengths) // shape[2]
            turns = sorted(range(shape[2]), key=lambda m: (-lengths[m] if lengths[m] > longest else 0, -m))
            wanted = [[m, lengths[m], int(partial[b, h, m]), int(index[b, h, m, 0]) * (lengths[m] > 0)] for m in turns]
            assert records.view(*shape[:3], 4)[b, h].tolist() == wanted
