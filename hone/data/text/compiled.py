"""Compilation: the decorators of numba kernels; those that Python calls are cached on disk, the others are part of their callers."""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import register_jitable

_INNER: dict[str, Any] = {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry = njit(cache=True, nogil=True, boundscheck=False, no_cfunc_wrapper=True)
"""For functions that Python calls: compiled once a machine. Nothing calls them from C, so no wrapper for that is made, which
would take an eighth of the time."""
allocating = register_jitable(**_INNER)
"""For functions that only kernels call. They stay plain Python functions: what calls them compiles them and holds their code, and
a call from Python runs in the interpreter."""
kernel = register_jitable(_nrt=False, **_INNER)
"""The same for functions that allocate nothing: without reference counts, which cost more than the work where an array is
passed to a small function for every word."""
inlined = register_jitable(_nrt=False, forceinline=True, **_INNER)
"""The same for functions that are always inlined into their callers."""
