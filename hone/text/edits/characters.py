"""Kernels over characters: where they begin and end, and whether two are in one word."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, kernel
from hone.text.units import POINT, is_joined, unit_of, unit_table

__all__ = ["before", "joined", "size_at", "unit_table"]

_JOINER = 0x200D
"""Zero width joiner: what follows it is part of the same character."""


@entry
def size_at(data: np.ndarray, at: int) -> int:
    """Bytes of the character that begins at `at`."""
    byte = data[at]
    return 1 if byte < 0x80 else (2 if byte < 0xE0 else (3 if byte < 0xF0 else 4))


@entry
def before(data: np.ndarray, at: int) -> int:
    """Where the character that ends at `at` begins."""
    at -= 1
    while data[at] & 0xC0 == 0x80:
        at -= 1
    return at


@entry
def joined(data: np.ndarray, left: int, right: int, letters: np.ndarray) -> bool:
    """Whether the characters that end at `left` and begin at `right` would be in one word side by side. `letters` is `unit_table()`.

    Hangul is written with spaces, and its words are not cut, although their syllables are compared one by one.
    """
    one, _ = unit_of(data, before(data, left), left, letters)
    other, _ = unit_of(data, right, len(data), letters)
    if one & POINT == _JOINER:  # between emoji, for instance, which are no words
        return True
    return is_joined(_spaced(one), _spaced(other))


@kernel
def _spaced(value: int) -> int:
    """`value` of `unit_table` as that of a letter of a script with spaces if it is a syllable of Hangul."""
    point = value & POINT
    return point if 0xAC00 <= point < 0xD7A4 else value
