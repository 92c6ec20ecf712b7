"""Tests of Triton kernels in Triton's interpreter, on CPU tensors: collected only where TRITON_INTERPRET=1 is set.

tests/ops/test_interpreter.py runs this folder in a process of its own; by hand: `TRITON_INTERPRET=1 pytest tests/ops/interpreted`.
Kernels become interpreted when their module is imported, so the variable must stand before the first import. The
interpreter is right in float32, float16 and float8 only: bfloat16 is silently wrong there. Keep shapes tiny.
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def scalars_are_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a kernel's loop run to a number it was given: the interpreter keeps numbers in arrays of one element, which
    NumPy 2.4 no longer turns into integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
