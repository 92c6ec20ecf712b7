"""What all tests of operations share: skips without a GPU, kernels in Triton's interpreter.

Files named `interpreted*.py` hold tests of Triton kernels on CPU tensors. Kernels become interpreted when their module is
imported, so TRITON_INTERPRET must be set before the first import: pytest does not collect these files by itself,
`test_interpreted.py` runs them in a process of their own. By hand:
`TRITON_INTERPRET=1 pytest tests/ops/norm/interpreted.py`. The interpreter is right in float32, float16 and float8 only:
bfloat16 is silently wrong there. Keep shapes tiny.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips before fixtures run, so that none touches CUDA."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


if os.environ.get("TRITON_INTERPRET") == "1":

    @pytest.fixture(autouse=True)
    def interpreter_of_today(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Two repairs of the interpreter.

        A kernel's loop may run to a number it was given: the interpreter keeps numbers in arrays of one element, which
        NumPy 2.4 no longer turns into integers. And the language is patched once a test: the interpreter does it again
        for every call of a device function, `tl.sum` included, which is most of its time.
        """
        from triton import language
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        monkeypatch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        yield
        scope.restore()
