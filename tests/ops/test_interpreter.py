"""Runs tests/ops/interpreted in a process of its own, where Triton kernels are interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_kernels_in_the_interpreter() -> None:
    """One process for the whole folder: most of a file's time would be imports."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=880)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "." in ran.stdout.split()[0]  # a dot a test; an empty folder would have exited with 5


def test_without_the_variable_nothing_is_collected() -> None:
    """A kernel of that folder must never be imported compiled and then found interpreted, or the other way round."""
    assert FILES
    if os.environ.get("TRITON_INTERPRET") != "1":
        collected = [name for name in sys.modules if name.startswith("tests.ops.interpreted.test_")]
        assert collected == []
