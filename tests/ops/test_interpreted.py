"""Runs the interpreted tests of all operations."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter import run_interpreted

pytest.importorskip("triton")
FILES = sorted(Path(__file__).parent.rglob("interpreted*.py"))


@pytest.mark.slow(seconds=150)
def test_kernels_in_the_interpreter() -> None:
    """One process for all of them: a third of the time of several would be imports."""
    run_interpreted(*FILES)


def test_without_the_variable_nothing_is_collected() -> None:
    """A kernel of these files must never be imported compiled and then found interpreted, or the other way round."""
    assert len(FILES) > 1
    if os.environ.get("TRITON_INTERPRET") != "1":
        collected = [name for name in sys.modules if name.startswith("tests.ops.") and "interpreted" in name]
        assert {name.rpartition(".")[2] for name in collected} <= {"test_interpreted"}
