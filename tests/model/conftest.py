"""What all tests of models share: every test starts from the same random numbers, whatever this worker ran before it."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures run, so that what they draw is the same, too."""
    torch.manual_seed(0)
