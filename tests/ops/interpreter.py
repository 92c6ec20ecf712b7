"""Runs test files in a process where Triton's kernels are interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(*files: Path) -> None:
    """Fails with the output of pytest if a test of `files` fails, or if they hold none."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "." in ran.stdout.split()[0]  # a dot a test; files without tests would have ended with 5
