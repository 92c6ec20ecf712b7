"""Attention over ranks on gloo: outputs and gradients are those of one process, for every technique and mask."""

from __future__ import annotations

import signal

import pytest
import torch

from hone.base.errors import SpecError
from hone.parallel.context.chunks import check_heads
from hone.parallel.context.layout import Layout
from tests.parallel.context_ranks import DOCUMENTS, LENGTH, SETTINGS, ended, errors
from tests.ranked import together


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_technique_is_exact(num_ranks):
    found = together(num_ranks, errors)
    assert all(one.returncode == 0 for one in found), "\n".join(one.stderr[-2000:] for one in found)
    for one in found:
        for setting, worst in zip(SETTINGS, one.result, strict=True):
            bound = 0.05 if setting.get("dtype") == "bfloat16" else 2e-6
            assert max(worst.values()) <= bound, f"{setting}: {worst}"


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_killed_rank_ends_all(at):
    found = together(4, ended, at)
    assert found[1].returncode == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert "lost" in found[rank].result, found[rank].result


def test_an_error_of_one_rank_ends_all():
    found = [one.result for one in together(4, ended, "error")]
    assert found.pop(1) == "ZeroDivisionError: a bug"
    assert all(one.startswith("MachineError: rank 1 failed: ZeroDivisionError: a bug") for one in found), found


@pytest.mark.parametrize("window", [None, 1, 7, 48])
@pytest.mark.parametrize("ids", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize(("num_ranks", "zigzag"), [(1, True), (2, True), (3, True), (4, True), (2, False), (3, False)])
def test_the_blocks_of_all_ranks_are_the_whole_mask(num_ranks, zigzag, ids, window):
    """Every pair is attended to once: by blocks of the ring, and by chunks over gathered keys."""
    layouts = [Layout(LENGTH, num_ranks, rank, zigzag=zigzag, document_ids=ids) for rank in range(num_ranks)]
    whole = layouts[0].whole(window).dense(LENGTH, LENGTH, "cpu")[:, 0].int()
    ring, gathered = torch.zeros_like(whole), torch.zeros_like(whole)
    for layout in layouts:
        for queries, keys, mask in layout.gathered(window):
            places = layout.places[queries]
            gathered[:, places, keys] += mask.dense(len(places), keys.stop, "cpu")[:, 0].int()
        for source in range(num_ranks):
            block = layout.block(source, window)
            if block is not None:
                rows, columns = layout.places[block.queries], layout.places_of(source)[block.keys]
                pairs = block.mask.dense(len(rows), len(columns), "cpu")[:, 0].int()
                ring[:, rows[:, None], columns] += pairs
    assert torch.equal(ring, whole) and torch.equal(gathered, whole)


def test_zigzag_is_equal_work():
    """Each rank computes as many pairs in every step; contiguous parts leave the first rank idle in all but one."""

    def work(zigzag: bool) -> list[int]:
        pairs = []
        for rank in range(4):
            layout = Layout(LENGTH, 4, rank, zigzag=zigzag)
            blocks = [layout.block(source) for source in range(4) if source != rank]
            places = layout.places
            pairs.append(sum(len(places[one.queries]) * len(places[one.keys]) for one in blocks if one))
        return pairs

    assert work(True) == [3 * 12 * 6] * 4
    assert work(False) == [0, 144, 288, 432]


def test_what_does_not_divide_is_said():
    with pytest.raises(SpecError, match="a sequence of 50 tokens is not divisible into 8 chunks") as caught:
        Layout(50, 4, 0)
    assert "multiple of 8" in caught.value.fix
    with pytest.raises(SpecError, match="cannot divide 6 query heads among 4"):
        check_heads(6, 2, 4)
    with pytest.raises(SpecError, match="cannot divide 3 key heads among 2"):
        check_heads(6, 3, 2)
    check_heads(8, 2, 4)
