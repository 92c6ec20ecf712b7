"""Gradients on their way between data-parallel ranks, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hone.train.data_parallel.flat import Flat
from hone.train.data_parallel.travel import ReducingApart

SHAPES = {"gate": (40, 16), "norm": (17,), "down": (16, 40)}


class Meeting:
    """The ranks of an axis in one process: what each sends lies here until all have started."""

    def __init__(self, size: int) -> None:
        self.given: list[Sequence[Sequence[Tensor]]] = []
        self.size = size


class AxisOf:
    """Rank `index` of a `Meeting`."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index, self.size = meeting, index, meeting.size

    def trade(self, taken: Sequence[Sequence[Tensor]], given: Sequence[Sequence[Tensor]]) -> AxisOf:
        """As `Axis.trade`."""
        self.meeting.given.append(given)
        self.taken = taken
        return self

    def wait(self) -> None:
        """What the others sent is there."""
        assert not self.taken[self.index] and not self.meeting.given[self.index][self.index], "none for itself"
        for rank, places in enumerate(self.taken):
            for place, sent in zip(places, self.meeting.given[rank][self.index], strict=True):
                place.copy_(sent)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_16_bit_gradients_are_summed_in_float32(size: int, whole: bool) -> None:
    seed = torch.Generator().manual_seed(size)
    flat, meeting = Flat(SHAPES, size, whole=whole), Meeting(size)
    every = [
        {name: torch.randn(shape, generator=seed).bfloat16() for name, shape in SHAPES.items()} for _ in range(size)
    ]
    kept = [{name: one.clone() for name, one in gradients.items()} for gradients in every]
    started = [ReducingApart(AxisOf(meeting, rank), flat, every[rank]) for rank in range(size)]  # type: ignore[arg-type]
    wanted = torch.zeros(flat.size)
    for name in SHAPES:
        for gradients in every:
            flat.view(wanted, name).add_(gradients[name].float())
    for rank, one in enumerate(started):
        assert torch.equal(one.part(), flat.slice_of(wanted, rank)), "the padding is zero, too"
    assert all(torch.equal(one[name], kept[rank][name]) for rank, one in enumerate(every) for name in SHAPES)
