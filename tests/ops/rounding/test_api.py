"""Compensated rounding and pruning against their definitions, on a CPU."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import prune_compensated, round_compensated
from hone.ops.rounding.api import Pruning
from hone.ops.rounding.selection import Pattern, largest, largest_of_group
from tests.ops.rounding.case import PRUNINGS, assert_pruned, assert_rounded, inputs, pruning


@pytest.mark.parametrize(("columns", "rows"), [(1, 3), (64, 5), (200, 17)])
@pytest.mark.parametrize("pruned", [False, True])
def test_codes_are_nearest_to_their_targets(columns: int, rows: int, pruned: bool) -> None:
    given = inputs(columns, rows)
    keep = torch.rand(columns, rows) > 0.5 if pruned else None
    before = {name: one.clone() for name, one in given.items()}
    codes = round_compensated(**given, low=-8, high=7, keep=keep)
    assert codes.dtype == torch.int8 and all(torch.equal(given[name], before[name]) for name in given)
    assert_rounded(codes, **given, low=-8, high=7, keep=keep)


def test_without_earlier_columns_it_rounds_to_nearest() -> None:
    given = inputs(100, 7)
    given["ratio"] = torch.eye(100)
    codes = round_compensated(**given, low=-128, high=127)
    assert torch.equal(codes.float(), (given["wanted"] / given["steps"]).round().clamp(-128, 127))


@pytest.mark.parametrize(("sparsity", "pattern"), PRUNINGS)
@pytest.mark.parametrize("pruned", [False, True])
def test_the_smallest_scores_become_zero_on_the_way(sparsity: float, pattern: Pattern | None, pruned: bool) -> None:
    given = inputs(264, 17)
    keep = torch.rand(264, 17) > 0.2 if pruned else None
    before = None if keep is None else keep.clone()
    prune = pruning(264, sparsity, pattern)
    codes = round_compensated(**given, low=-8, high=7, keep=keep, prune=prune)
    assert_rounded(codes, **given, low=-8, high=7, keep=keep, prune=prune)
    values = prune_compensated(given["wanted"], given["ratio"], prune, keep)
    assert values.dtype == torch.float32 and (before is None or torch.equal(keep, before))
    assert_pruned(values, given["wanted"], given["ratio"], prune, keep)


def test_nothing_to_prune_leaves_everything_and_float64_stays() -> None:
    given = {name: one.double() for name, one in inputs(70, 5).items()}
    prune = Pruning(torch.ones(70, dtype=torch.float64), 0.0)
    values = prune_compensated(given["wanted"], given["ratio"], prune)
    assert torch.equal(values, given["wanted"])


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_of_equal_scores_the_first_go(count: int) -> None:
    scores = torch.randint(0, 3, (50, 9), generator=torch.Generator().manual_seed(count)).float()
    expected = torch.ones(50, 9, dtype=torch.bool)
    expected.scatter_(1, scores.sort(dim=1, stable=True).indices[:, :count], False)
    assert torch.equal(largest(scores, count), expected)
    assert torch.equal(largest_of_group(scores.T, 9 - count), expected.T)


def test_shapes_that_do_not_fit_are_refused() -> None:
    given = inputs(8, 4)
    with pytest.raises(SpecError, match=r"ratio \(7, 7\) do not fit"):
        round_compensated(given["wanted"], given["steps"], given["ratio"][:7, :7], -8, 7)
    with pytest.raises(SpecError, match="backend is 'gluon'"):
        round_compensated(**given, low=-8, high=7, backend="gluon")
    with pytest.raises(SpecError, match="groups of 3 columns do not divide the 9 columns, or the 64 of a block"):
        prune_compensated(torch.ones(9, 2), torch.eye(9), Pruning(torch.ones(9), pattern=Pattern(1, 3)))
