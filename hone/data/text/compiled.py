"""How kernels are compiled: what Python calls is kept on disk, what only kernels call costs as little as it can."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

_ANY: dict[str, Any] = {"nogil": True, "boundscheck": False, "no_cfunc_wrapper": True}
_INNER: dict[str, Any] = {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry = njit(cache=True, **_ANY)
"""For functions that Python may call: compiled once a machine. No hone kernel is called from C, so the wrapper for that, which
takes an eighth of the time, is not made."""


class _Inner(type(entry(lambda: None))):  # type: ignore[misc]
    """A function that has no way in from Python: a call would crash the process, so it is an error instead."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"only kernels call {self.__name__}; to try it out, compile its py_func")


def _inner(**options: Any) -> Callable[[Callable], Any]:
    compiled = njit(**_INNER, **options)

    def decorate(function: Callable) -> Any:
        dispatcher = compiled(function)
        dispatcher.__class__ = _Inner
        return dispatcher

    return decorate


allocating = _inner()
"""For functions that kernels alone call: what calls them holds their code, so they need no file of their own and no way in
from Python."""
kernel = _inner(_nrt=False)
"""The same for functions that allocate nothing: without reference counts, which cost more than the work where an array is
handed to a small function for every word."""
inlined = _inner(_nrt=False, forceinline=True)
"""The same for functions that are part of whatever calls them."""


class _Uncollected(event.Listener):
    """Pauses the garbage collector while numba compiles: what a compiler makes lives until it is done, and looking through
    it again and again takes a sixth of the time. Compiling is one at a time, under a lock of numba's."""

    def __init__(self) -> None:
        self._depth, self._enabled = 0, False

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._enabled = gc.isenabled()
            gc.disable()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._enabled:
            gc.enable()


event.register("numba:compile", _Uncollected())
