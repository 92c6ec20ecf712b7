"""The kernels of many adapters in the interpreter against plain torch: mixtures of slots, ranks, pieces, few rows and many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import lora_expand, lora_shrink

WIDTHS = (20, 4, 130)


def bank(slots: int, rank: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A and B of all slots, and ranks of which some are 0 and the rest between 1 and `rank`; beyond a rank all is NaN."""
    generator = torch.Generator().manual_seed(seed)
    downs = torch.randn(slots, len(WIDTHS) * rank, columns, generator=generator)
    ups = torch.randn(slots, sum(WIDTHS), rank, generator=generator)
    ranks = torch.randint(0, rank + 1, (slots, len(WIDTHS)), generator=generator, dtype=torch.int32)
    ranks[0, 0], ranks[-1] = rank, torch.tensor([1, 0, rank])
    for slot, own in enumerate(ranks.tolist()):
        begin = 0
        for piece, (width, count) in enumerate(zip(WIDTHS, own, strict=True)):
            downs[slot, piece * rank + count : (piece + 1) * rank] = torch.nan
            ups[slot, begin : begin + width, count:] = torch.nan
            begin += width
    return downs, ups, ranks


@pytest.mark.parametrize("rows", [1, 7, 40, 150])
@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("scaled", [False, True])
def test_each_row_has_the_factors_of_its_slot(rows: int, rank: int, scaled: bool) -> None:
    columns, num_slots = 300, 5
    downs, ups, ranks = bank(num_slots, rank, columns)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    y = torch.randn(rows, sum(WIDTHS), generator=generator)
    slots = torch.randint(-1, num_slots, (rows,), generator=generator, dtype=torch.int32)
    factors = torch.randn(num_slots, sum(WIDTHS), 2, generator=generator) if scaled else None
    narrow = lora_shrink(x, downs, slots, ranks, backend="triton")
    found = lora_expand(narrow, ups, slots, ranks, y.clone(), WIDTHS, factors=factors, backend="triton")
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(found[row], y[row])
            continue
        plain = y[row].double() if factors is None else y[row].double() * factors[slot, :, 0] + factors[slot, :, 1]
        begin = 0
        for piece, (width, count) in enumerate(zip(WIDTHS, ranks[slot].tolist(), strict=True)):
            down, up = downs[slot, piece * rank :][:count].double(), ups[slot, begin : begin + width, :count].double()
            plain[begin : begin + width] += up @ (down @ x[row].double())
            begin += width
        torch.testing.assert_close(found[row].double(), plain, atol=1e-3, rtol=1e-4)


def test_factors_that_are_views_of_one_store() -> None:
    """A server keeps all linears of a slot in one row, so that a slot's factors are far from the next one's."""
    downs, ups, ranks = bank(3, 16, 64)
    store = torch.full((3, downs[0].numel() + ups[0].numel() + 9), torch.nan)
    first, second = store[:, 9:].split([downs[0].numel(), ups[0].numel()], 1)
    first.copy_(downs.flatten(1))
    second.copy_(ups.flatten(1))
    slots = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    x, y = torch.randn(4, 64).half(), torch.zeros(4, sum(WIDTHS)).half()
    store = store.half()
    first, second = store[:, 9:].split([downs[0].numel(), ups[0].numel()], 1)
    views = first.unflatten(1, downs.shape[1:]), second.unflatten(1, ups.shape[1:])
    ours, plain = (
        lora_expand(
            lora_shrink(x, views[0], slots, ranks, backend=one), views[1], slots, ranks, y.clone(), WIDTHS, backend=one
        )
        for one in ("triton", "reference")
    )
    torch.testing.assert_close(ours, plain, atol=0.5, rtol=0.02)
