"""The update's kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from hone.ops import widen
from tests.ops.update.case import assert_steps


@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_a_step_is_the_formulas(size: int) -> None:
    assert_steps(size, torch.float16, torch.float16, "cpu", "triton")


@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_a_gradient_is_widened_or_added(size: int) -> None:
    source, room = torch.randn(size).half(), torch.full((size + 9,), 5.0)
    widen(room[:size], source, backend="triton")
    assert torch.equal(room[:size], source.float())
    widen(room[:size], source, add=True, backend="triton")
    assert torch.equal(room[:size], 2 * source.float()) and (room[size:] == 5).all()
    other = torch.randn(size).half()
    widen(room[:size], source, other, backend="triton")
    assert torch.equal(room[:size], source.float() + other.float()) and (room[size:] == 5).all()
