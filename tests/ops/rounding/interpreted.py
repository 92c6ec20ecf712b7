"""The rounding and pruning kernel in the interpreter against its definitions."""

from __future__ import annotations

import pytest
import torch

from hone.ops import prune_compensated, round_compensated
from hone.ops.rounding.selection import Pattern
from tests.ops.rounding.case import assert_pruned, assert_rounded, inputs, pruning


@pytest.mark.parametrize(("columns", "rows", "bits"), [(5, 3, 4), (64, 16, 2), (70, 20, 8)])
@pytest.mark.parametrize("pruned", [False, True])
def test_codes_are_nearest_to_their_targets(columns: int, rows: int, bits: int, pruned: bool) -> None:
    given = inputs(columns, rows)
    keep = torch.rand(columns, rows) > 0.5 if pruned else None
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    codes = round_compensated(**given, low=low, high=high, keep=keep, backend="triton")
    assert_rounded(codes, **given, low=low, high=high, keep=keep)
    plain = round_compensated(**given, low=low, high=high, keep=keep, backend="reference")
    assert (codes != plain).float().mean() < 0.02


@pytest.mark.parametrize(("pattern", "pruned"), [(None, False), (Pattern(2, 4), True), (Pattern(4, 8), False)])
def test_the_smallest_scores_become_zero_on_the_way(pattern: Pattern | None, pruned: bool) -> None:
    given = inputs(24, 20)
    keep = torch.rand(24, 20) > 0.2 if pruned else None
    prune = pruning(24, 0.5, pattern)
    codes = round_compensated(**given, low=-8, high=7, keep=keep, prune=prune, backend="triton")
    assert_rounded(codes, **given, low=-8, high=7, keep=keep, prune=prune)
    values = prune_compensated(given["wanted"], given["ratio"], prune, keep, backend="triton")
    assert_pruned(values, given["wanted"], given["ratio"], prune, keep)
