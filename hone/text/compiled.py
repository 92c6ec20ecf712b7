"""Compilation: the decorators of numba kernels; functions called from Python are cached on disk, the others are part of their callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import register_jitable

from hone.measure.compilers import compile_without_collections, sources_digest

_INNER: dict[str, Any] = {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compile_without_collections()
_outer = njit(cache=True, nogil=True, boundscheck=False, no_cfunc_wrapper=True)


def entry(function: Callable) -> Any:
    """For functions called from Python: compiled once per machine. They are not called from C, and compiling no wrapper for that
    saves an eighth of the time.

    Numba keeps what it compiled by processor, version and the time of the file's last change, and looks at no other file whose
    functions are compiled into it: their texts are added to the key, by an attribute that has no public name.
    """
    compiled = _outer(function)
    kept = compiled._cache._cache_file
    kept._source_stamp = (kept._source_stamp, sources_digest(function.__module__))
    return compiled


allocating = register_jitable(**_INNER)
"""For functions called only from kernels. They stay plain Python functions, compiled as part of their callers; a
call from Python runs in the interpreter."""
kernel = register_jitable(_nrt=False, **_INNER)
"""The same for functions that do not allocate: without reference counting, which costs more than the work where an array is
passed to a small function for every word."""
inlined = register_jitable(_nrt=False, forceinline=True, **_INNER)
"""The same for functions to be inlined into their callers always."""
