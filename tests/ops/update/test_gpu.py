"""The update's kernels on a GPU against the formula; every element written, none beyond."""

from __future__ import annotations

import pytest
import torch

from hone.ops import widen
from tests.ops.gpu_case import poison
from tests.ops.update.case import assert_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1, 2048, 100_003])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_the_formulas(size: int, grad_dtype: torch.dtype) -> None:
    assert_steps(size, grad_dtype, torch.bfloat16, "cuda", "triton")


@pytest.mark.parametrize("size", [1, 2048, 100_003])
def test_a_gradient_is_widened_or_added(size: int) -> None:
    poison()
    source, room = torch.randn(size, device="cuda").bfloat16(), torch.full((size + 9,), 5.0, device="cuda")
    widen(room[:size], source)
    assert torch.equal(room[:size], source.float())
    widen(room[:size], source, add=True)
    assert torch.equal(room[:size], 2 * source.float()) and (room[size:] == 5).all()
