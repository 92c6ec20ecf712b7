"""Rows of experts in rooms of a fixed size: the numbers are those of exact sizes, also where a room was too small and the pass is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.parallel.piece_bound import Counted, PieceBound
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.expert_parallel.expert_ranks import in_rooms

MOE = {"kind": "moe", "num_experts": 8, "intermediate_size": 32, "num_shared_experts": 1, "balance": ["bias"]}
MODEL = {"num_layers": 2, "feed_forward": ["swiglu", MOE]}


def check(found: list[list[Any]], micro_batches: int, recomputed: bool) -> None:
    for number, rank in enumerate(found):
        for exact, rooms, small in zip(rank[::3], rank[1::3], rank[2::3], strict=True):
            for one in (rooms, small):
                torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(exact[0]), rtol=2e-6, atol=2e-6)
            assert (
                exact[1:3] == [None, 0] and rooms[2] == 0 and small[2] == (number < 2)
            )  # the others only make the pass again
            assert rooms[1] % 128 == 0 and len(rooms[3]) == 4 * micro_batches * (1 + recomputed)
            assert set(rooms[3][micro_batches * (1 + recomputed) :]) == {2 * rooms[1]}
            assert set(exact[3]).isdisjoint({2 * rooms[1]})


@pytest.mark.slow
def test_two_ranks_have_the_numbers_of_exact_sizes(data_folder: Path) -> None:
    """Where weights are gathered for a pass and where they are not; recomputed layers are in the same rooms."""
    shared = {"model": MODEL, "parallelism": {"expert_parallel_degree": 2}}
    kinds = [{**shared, "data_parallel": one} for one in ("zero2", "zero3")]
    check(on_ranks(2, in_rooms, str(data_folder), [kinds[0], {**kinds[1], "uneven": True}]), 1, recomputed=False)
    again = [{**one, "activation_checkpointing": "full", "gradient_accumulation_steps": 2} for one in kinds]
    check(on_ranks(2, in_rooms, str(data_folder), again), 2, recomputed=True)


@pytest.mark.slow
def test_ranks_of_other_experts_make_a_pass_again_together(data_folder: Path) -> None:
    setting = {"model": MODEL, "data_parallel": "zero3", "parallelism": {"expert_parallel_degree": 2}}
    found = on_ranks(4, in_rooms, str(data_folder), [setting])
    check(found, 1, recomputed=False)
    for rank in found:  # also those of ranks whose rows did fit
        assert len(rank[2][3]) == len(rank[1][3]) + 1


def counted(every: list[list[int]], room: int | None) -> Counted:
    return Counted(torch.tensor(every), None, room)


def test_a_room_is_a_little_more_than_the_largest_piece_and_changes_seldom() -> None:
    bound = PieceBound()
    bound.begin()
    assert bound.room is None
    bound.counted(counted([[300, 700, 100, 500], [0, 10, 20, 30]], None))  # pieces of 1000, 600, 10 and 50 rows
    assert not bound.settle() and bound.rows == 1152 and bound.room is None
    bound.begin()
    assert bound.room == 1152
    bound.counted(counted([[500, 500, 0, 0], [0, 0, 0, 1100]], bound.room))
    assert not bound.settle() and bound.rows == 1152
    bound.counted(counted([[500, 500, 0, 0], [0, 0, 0, 1152]], bound.room))
    assert not bound.settle() and bound.rows == 1280 and bound.room == 1152  # until the next pass begins
    bound.counted(counted([[500, 500, 0, 0], [0, 0, 0, 1153]], bound.room))
    assert bound.settle() and bound.overflows == 1
    bound.begin()
    bound.counted(counted([[100, 100, 100, 100], [100, 100, 100, 100]], bound.room))
    assert not bound.settle() and bound.rows == 256
    bound.close()
    assert bound.room is None and not bound.settle()
