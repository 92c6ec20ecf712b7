"""Compilation: the decorators of numba kernels; functions called from Python are cached on disk, the others are part of their callers."""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import register_jitable

_INNER: dict[str, Any] = {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry = njit(cache=True, nogil=True, boundscheck=False, no_cfunc_wrapper=True)
"""For functions called from Python: compiled once per machine. They are not called from C, and compiling no wrapper for that
saves an eighth of the time."""
allocating = register_jitable(**_INNER)
"""For functions called only from kernels. They stay plain Python functions, compiled as part of their callers; a
call from Python runs in the interpreter."""
kernel = register_jitable(_nrt=False, **_INNER)
"""The same for functions that do not allocate: without reference counting, which costs more than the work where an array is
passed to a small function for every word."""
inlined = register_jitable(_nrt=False, forceinline=True, **_INNER)
"""The same for functions to be inlined into their callers always."""
