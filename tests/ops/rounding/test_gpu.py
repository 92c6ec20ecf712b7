"""The rounding and pruning kernel on a GPU against its definitions, and two runs bit by bit."""

from __future__ import annotations

import pytest
import torch

from hone.ops import prune_compensated, round_compensated
from hone.ops.rounding.selection import Pattern
from tests.ops.gpu_case import poison
from tests.ops.rounding.case import PRUNINGS, assert_pruned, assert_rounded, inputs, pruning

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("columns", "rows", "bits"), [(64, 16, 4), (200, 1000, 3), (1000, 77, 8), (1024, 4096, 4)])
@pytest.mark.parametrize("pruned", [False, True])
def test_codes_are_nearest_to_their_targets(columns: int, rows: int, bits: int, pruned: bool) -> None:
    given = inputs(columns, rows, "cuda")
    keep = torch.rand(columns, rows, device="cuda") > 0.5 if pruned else None
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    poison()
    codes = round_compensated(**given, low=low, high=high, keep=keep)
    assert torch.equal(codes, round_compensated(**given, low=low, high=high, keep=keep))
    assert_rounded(codes, **given, low=low, high=high, keep=keep)


@pytest.mark.parametrize(("columns", "rows"), [(64, 16), (200, 1000), (1024, 4096)])
@pytest.mark.parametrize(("sparsity", "pattern"), PRUNINGS)
@pytest.mark.parametrize("pruned", [False, True])
def test_the_smallest_scores_become_zero_on_the_way(
    columns: int, rows: int, sparsity: float, pattern: Pattern | None, pruned: bool
) -> None:
    given = inputs(columns, rows, "cuda")
    keep = torch.rand(columns, rows, device="cuda") > 0.2 if pruned else None
    prune = pruning(columns, sparsity, pattern, "cuda")
    poison()
    codes = round_compensated(**given, low=-8, high=7, keep=keep, prune=prune)
    assert torch.equal(codes, round_compensated(**given, low=-8, high=7, keep=keep, prune=prune))
    assert_rounded(codes, **given, low=-8, high=7, keep=keep, prune=prune)
    poison()
    values = prune_compensated(given["wanted"], given["ratio"], prune, keep)
    assert torch.equal(values, prune_compensated(given["wanted"], given["ratio"], prune, keep))
    assert_pruned(values, given["wanted"], given["ratio"], prune, keep)
