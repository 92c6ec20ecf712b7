"""What a CPU can run: the vector instructions that the compiled kernels use, found without importing numba."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

ISAS = ("avx512_bf16", "avx512", "avx2")
"""The instruction sets that there are kernels for, best first."""

_FLAGS = {
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
}


@cache
def cpu_isa() -> str:
    """The best of `ISAS` that this machine has, and can compile for; '' when there is none.

    HONE_CPU_ISA names a lesser one, or 'none' for torch's operations only: for tests and comparisons.
    """
    found = best_isa(_flags()) if importlib.util.find_spec("numba") is not None else ""
    wanted = os.environ.get("HONE_CPU_ISA", found)
    if wanted == found or not found:
        return found
    return wanted if wanted in ISAS[ISAS.index(found) :] else ""


def best_isa(flags: set[str]) -> str:
    """The best of `ISAS` whose instructions are all among `flags`, names as in /proc/cpuinfo; '' when there is none."""
    return next((isa for isa in ISAS if _FLAGS[isa] <= flags), "")


def _flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf8")
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")), "").split())
