"""The kernels of a linear with many adapters in the interpreter, against each row's product with its own factors in float64."""

from __future__ import annotations

import pytest
import torch

from hone.ops import slotted_linear
from hone.ops.linear.shapes import SkinnyShape
from hone.ops.lora.triton_slotted import launch_groups, slotted_product

SLOTS = 9


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("widths", [(128, 64, 64), (130,)])
@pytest.mark.parametrize("rank", [16, 32])
def test_each_row_has_the_factors_of_its_slot(rows: int, widths: tuple[int, ...], rank: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    columns, features = 1100 if rank == 16 else 300, sum(widths)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 8).half()

    x, weight, bias = draw(rows, columns), draw(features, columns), draw(features)
    downs, ups = draw(SLOTS, len(widths) * rank, columns), draw(SLOTS, features, rank)
    ranks = torch.randint(0, rank + 1, (SLOTS, len(widths)), generator=generator, dtype=torch.int32)
    slots = torch.randint(-1, SLOTS, (rows,), generator=generator, dtype=torch.int32)
    expected = x.double() @ weight.double().T + bias.double()
    for row, slot in enumerate(slots.tolist()):
        begin = 0
        for piece, width in enumerate(widths if slot >= 0 else ()):
            count = int(ranks[slot, piece])
            low = downs[slot, piece * rank : piece * rank + count].double() @ x[row].double()
            expected[row, begin : begin + width] += ups[slot, begin : begin + width, :count].double() @ low
            begin += width
    parts = (x, weight, bias, downs, ups)
    groups = launch_groups(slots, len(widths) * rank // 16)
    split = SkinnyShape(64, max(16, 1 << (rows - 1).bit_length()), 128, 4, 3, 2, early=True)
    for found in (
        slotted_linear(*parts, slots, ranks, widths, backend="triton"),
        slotted_product(*parts, groups, ranks, widths, shape=split),
        slotted_product(*parts, groups, ranks, widths, shape=split),  # the counts are back at zero
    ):
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1e-2)


def test_slots_are_counted_and_ordered() -> None:
    slots = torch.tensor([5, -1, 2, 5, 0, 2], dtype=torch.int32)
    groups = launch_groups(slots, 1).tolist()
    assert groups[:4] == [3, 0, 2, 5] and groups[17:23] == [2, -1, 1, 2, 0, 1] and groups[33:] == [0] * 16


def test_another_rows_adapter_changes_nothing() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).half(), torch.randn(128, 64).half()
    downs, ups = torch.randn(3, 16, 64).half(), torch.randn(3, 128, 16).half()
    ranks = torch.full((3, 1), 16, dtype=torch.int32)
    together, alone = (
        slotted_linear(x, weight, None, downs, ups, torch.tensor(slots).int(), ranks, (128,), backend="triton")
        for slots in ([0, 1, 2, -1], [-1, 1, -1, -1])
    )
    torch.testing.assert_close(together[[1, 3]], alone[[1, 3]], atol=0, rtol=0)
