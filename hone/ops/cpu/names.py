"""Names of compiled functions that other functions make: by what they compute with, so that no two share a symbol."""

from __future__ import annotations

import hashlib
from typing import Any

from numba.extending import register_jitable


def jitable(function: Any) -> Any:
    """`register_jitable` for a function inside another one.

    Numba builds a symbol from a function's qualified name, the types of its arguments and a number that each process counts for
    itself. Of two programs on disk that different processes compiled, whichever a third process loads first lends the other its
    functions of equal symbols: a product of dense weights was computed with the tile of 4-bit ones. Hence the digest in the name.
    """
    return register_jitable(named(function))


def named(function: Any) -> Any:
    """`function`, with a digest of what it closes over at the end of its qualified name."""
    function.__qualname__ += "_" + hashlib.sha256(_said(function).encode()).hexdigest()[:16]
    return function


def _said(value: Any) -> str:
    """What a function or a value that one closes over is, equal in every process."""
    function = getattr(value, "__wrapped__", value)  # an intrinsic wraps what defines it
    if hasattr(function, "__code__"):
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
        where = f"{function.__module__}:{function.__code__.co_firstlineno} {function.__qualname__}"
        return f"{where}({', '.join(map(_said, inside))})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_said, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_said(key)}: {_said(one)}' for key, one in value.items())}}}"
    said = repr(value)
    assert " at 0x" not in said, f"{said} differs between processes"
    return said
