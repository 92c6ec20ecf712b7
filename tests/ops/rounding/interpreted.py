"""The rounding kernel in the interpreter against its definition."""

from __future__ import annotations

import pytest
import torch

from hone.ops import round_compensated
from tests.ops.rounding.case import assert_rounded, inputs


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
