"""The gate's kernels on a GPU against float64, two runs bit for bit."""

from __future__ import annotations

import pytest
import torch

from hone.ops import clamped_swiglu, swiglu
from tests.ops.gpu_case import DTYPES, as_good

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 14336), (5, 3, 100), (1001, 2050)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    as_good(lambda backend: lambda x: swiglu(x, backend=backend), (torch.randn(shape, device="cuda").to(dtype),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5760), (5, 3, 100), (1001, 2050)])
def test_clamped_swiglu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape, device="cuda")).to(dtype)
    as_good(lambda backend: lambda x: clamped_swiglu(x, 2.0, backend=backend), (x,))
