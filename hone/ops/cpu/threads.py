"""Runs a compiled function on torch's own OpenMP threads, so that two pools never compete for the cores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from hone.ops.dispatch import say_once


def run_on_threads(address: int, data: int, num_threads: int) -> None:
    """Calls the C function void(intptr) at `address` with `data` once on each of up to `num_threads` threads, without the GIL.

    Fewer threads may come than asked for; the function must not wait for all of them.
    """
    _parallel()(address, data, num_threads)


@cache
def _parallel() -> Callable[[int, int, int], None]:
    """GOMP_parallel of the OpenMP library that torch has loaded (Intel's and LLVM's have it too), else threads of Python."""
    if torch.backends.openmp.is_available():
        for path in _loaded("omp"):
            found = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if found is not None:
                found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                found.restype = None
                return lambda address, data, num_threads: found(address, data, num_threads, 0)
    say_once("torch's OpenMP library was not found: compiled CPU kernels start threads of their own")
    return _with_python_threads


def _loaded(part: str) -> list[str]:
    """The shared libraries of this process with `part` in their names."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf8").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return [path for path in paths if part in Path(path).name and ".so" in Path(path).name]


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="hone-cpu")


def _with_python_threads(address: int, data: int, num_threads: int) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    if num_threads == 1:
        function(data)
        return
    for one in [_pool(num_threads).submit(function, data) for _ in range(num_threads)]:
        one.result()
