"""Huge pages of the operating system for weights that are read from memory in every step."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: make the pages of a range huge ones now."""
_HUGE = 1 << 21
_SMALLEST = 1 << 19


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Asks Linux to hold tensors in pages of 2 MiB: a core then reads them up to a fifth faster. Values and addresses stay.

    Returns the bytes that now are; where it cannot (another system, an older Linux, memory mapped from a file) nothing changes.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if madvise is None:
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    places: set[int] = set()  # whole pages, also where a tensor ends: its neighbour may have the rest
    for one in tensors:
        size = one.numel() * one.element_size()
        if one.device.type == "cpu" and one.is_contiguous() and size >= _SMALLEST:
            places.update(range(one.data_ptr() // _HUGE, (one.data_ptr() + size - 1) // _HUGE + 1))
    held = 0
    for place in sorted(places):
        if madvise(place * _HUGE, _HUGE, mmap.MADV_HUGEPAGE) == 0 and madvise(place * _HUGE, _HUGE, _COLLAPSE) == 0:
            held += _HUGE
    return held
