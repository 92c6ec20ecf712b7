"""A step's arrays in one buffer, for another rank's process or a file, and back without a copy. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import numpy as np

from hone.serve.step import Arrays

_ALIGNED = 16
"""Bytes at whose multiples arrays begin in a packed buffer, so that kernels may read it in place."""

_A = TypeVar("_A", bound=Arrays)


def pack(step: Arrays) -> np.ndarray:
    """Everything in one uint8 buffer: the shapes, then the arrays."""
    each = [array for _, array in step.arrays()]
    for (name, dtype, ndim), array in zip(_leaves(type(step)), each, strict=True):
        assert (array.dtype, array.ndim) == (dtype, ndim), f"{name} is {array.dtype} with {array.ndim} axes"
    shapes = np.array([(*array.shape, -1)[:2] for array in each], dtype=np.int64)
    parts = [shapes, *each]
    starts, total = _starts([part.nbytes for part in parts])
    buffer = np.zeros(total, dtype=np.uint8)
    for start, part in zip(starts, parts):
        buffer[start : start + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return buffer


def unpack(cls: type[_A], buffer: np.ndarray | bytes) -> _A:
    """The `cls` that was packed; its arrays are views of `buffer` when that is an array."""
    if not isinstance(buffer, np.ndarray):
        buffer = np.frombuffer(buffer, dtype=np.uint8).copy()  # aligned, and writable as torch wants it
    leaves = _leaves(cls)
    shapes = buffer[: 16 * len(leaves)].view(np.int64).reshape(-1, 2).tolist()
    sized = [(dtype, tuple(shape[:ndim])) for (_, dtype, ndim), shape in zip(leaves, shapes)]
    lengths = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in sized]
    starts, _ = _starts([16 * len(leaves), *lengths])
    views = [
        buffer[start : start + length].view(dtype).reshape(shape)
        for start, length, (dtype, shape) in zip(starts[1:], lengths, sized)
    ]
    return _filled(cls, iter(views))


def _starts(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these lengths begin, each aligned, and the length of them all."""
    starts, end = [], 0
    for length in lengths:
        start = -(-end // _ALIGNED) * _ALIGNED
        starts.append(start)
        end = start + length
    return starts, end


@cache
def _leaves(cls: type[Arrays]) -> list[tuple[str, np.dtype, int]]:
    """(dotted name, dtype, number of axes) of every array, nested ones in their place."""
    leaves: list[tuple[str, np.dtype, int]] = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if get_origin(hint) is Annotated:
            leaves.append((name, *hint.__metadata__))
        else:
            leaves += [(f"{name}.{inner}", dtype, ndim) for inner, dtype, ndim in _leaves(hint)]
    return leaves


def _filled(cls: type[_A], views: Iterator[np.ndarray]) -> _A:
    hints: list[Any] = list(get_type_hints(cls, include_extras=True).values())
    return cls(*(next(views) if get_origin(hint) is Annotated else _filled(hint, views) for hint in hints))
