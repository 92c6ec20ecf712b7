"""Compensated rounding against its definition, on a CPU."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import round_compensated
from tests.ops.rounding.case import assert_rounded, inputs


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


def test_shapes_that_do_not_fit_are_refused() -> None:
    given = inputs(8, 4)
    with pytest.raises(SpecError, match=r"ratio \(7, 7\) do not fit"):
        round_compensated(given["wanted"], given["steps"], given["ratio"][:7, :7], -8, 7)
    with pytest.raises(SpecError, match="backend is 'gluon'"):
        round_compensated(**given, low=-8, high=7, backend="gluon")
