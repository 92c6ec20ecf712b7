"""Compiled kernels of another processor or another torch are not found; numba compiles without garbage collection."""

from __future__ import annotations

import gc
import os

import pytest

from hone.measure import compilers
from hone.measure.compilers import compile_without_collections, keep_kernels_apart


@pytest.fixture
def folder(monkeypatch):
    """Where inductor would keep its kernels."""

    def find(**limits: str) -> str:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        for name in compilers.LIMITS:
            monkeypatch.delenv(name, raising=False)
        for name, value in limits.items():
            monkeypatch.setenv(name, value)
        keep_kernels_apart()
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    yield find


def test_each_processor_and_version_has_its_own(folder, monkeypatch):
    here = folder()
    assert folder() == here
    limited = folder(ATEN_CPU_CAPABILITY="default")
    monkeypatch.setattr(compilers, "version", lambda _: "9.0")
    newer = folder()
    monkeypatch.setattr(compilers.Path, "read_text", lambda *_, **__: "flags : fpu avx512f\n")
    assert len({here, limited, newer, folder()}) == 4


def test_the_users_own_folder_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_kernels_apart()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


def test_collections_pause_while_numba_compiles():
    numba = pytest.importorskip("numba")
    from numba.core import compiler_lock, event

    compile_without_collections()
    seen = []

    class Seen(event.Listener):
        def on_start(self, event: object) -> None:
            seen.append(gc.isenabled())

        on_end = on_start

    with event.install_listener("numba:run_pass", Seen()):
        assert numba.njit(lambda x: x + 1)(1) == 2
    assert len(seen) > 10 and not any(seen) and gc.isenabled()
    gc.disable()
    try:
        with compiler_lock.global_compiler_lock:
            pass
        assert not gc.isenabled()  # whoever had switched it off finds it so
    finally:
        gc.enable()
