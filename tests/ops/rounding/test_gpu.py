"""The rounding kernel on a GPU against its definition, and two runs bit by bit."""

from __future__ import annotations

import pytest
import torch

from hone.ops import round_compensated
from tests.ops.gpu_case import poison
from tests.ops.rounding.case import assert_rounded, inputs

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
