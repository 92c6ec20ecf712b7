"""Decode attention over shared pages in the interpreter against the paged reference."""

from __future__ import annotations

import pytest
import torch

from hone.ops import attend_paged, attend_shared


@pytest.mark.parametrize(("shared", "group", "page_size"), [((1, 4, 2), 3, 32), ((0, 0, 0), 1, 32), ((0, 5, 1), 2, 16)])
def test_shared_pages(shared: tuple[int, int, int], group: int, page_size: int) -> None:
    begin, end, pages = shared
    q = torch.randn(5, 2 * group, 16)
    k_pages, v_pages = torch.randn(2, 30, 2, page_size, 16)
    k_pages[29], v_pages[29] = float("nan"), float("nan")
    table = torch.randperm(25).view(5, 5)
    table[begin:end, :pages] = table[begin, :pages].clone()
    lens = torch.tensor([7, 2 * page_size, 3 * page_size + 1, 4 * page_size + 5, 2 * page_size + 9])
    lens[begin:end] = lens[begin:end].clamp(min=pages * page_size)
    expected = attend_paged(q, k_pages, v_pages, table, lens, scale=0.3)
    table[lens[:, None] <= torch.arange(5) * page_size] = 29  # pages past the end are not read
    found = attend_shared(
        q, k_pages, v_pages, table, lens, torch.tensor(shared, dtype=torch.int32), scale=0.3, backend="triton"
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
