"""Kernels on a real GPU: every test of this folder skips where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips before fixtures run, so that none touches CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
