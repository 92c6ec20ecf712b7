"""Runs the interpreted tests of this folder in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(*sorted(Path(__file__).parent.glob("interpreted*.py")))
