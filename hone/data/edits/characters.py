"""Kernels over characters: word characters, single-character words, and lower case."""

from __future__ import annotations

import unicodedata

import numpy as np

from hone.data.text.compiled import entry
from hone.data.text.segment import code_point

BETWEEN, WORD, ALONE, MARK = 0, 1, 2, 3
"""Punctuation and space; part of a word; a word of its own (scripts without spaces); combined with the character before it."""

_TABLED = 0x3000
_UNSPACED = ((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800))


def _kinds() -> np.ndarray:
    """uint8 [_TABLED]: the kind of every character below CJK, by its Unicode category."""
    table = np.zeros(_TABLED, np.uint8)
    for code in range(_TABLED):
        char = chr(code)
        unspaced = any(low <= code < high for low, high in _UNSPACED)
        if unicodedata.category(char).startswith("M") or code == 0x200D:
            table[code] = MARK
        elif char.isalnum() or char == "_":
            table[code] = ALONE if unspaced else WORD
    return table


def _small() -> np.ndarray:
    """uint16 [_TABLED]: every character in lower case; characters whose lower case has several characters stay."""
    table = np.arange(_TABLED).astype(np.uint16)
    for code in range(_TABLED):
        lowered = chr(code).lower()
        if len(lowered) == 1 and ord(lowered) < _TABLED:
            table[code] = ord(lowered)
    return table


_KINDS = _kinds()
SMALL = _small()


@entry
def kind_of(code: int) -> int:
    """BETWEEN, WORD, ALONE or MARK."""
    if code < 0x3000:
        return _KINDS[code]
    if 0xAC00 <= code < 0xD7B0:
        return WORD
    if 0x3005 <= code < 0x3008 or 0x3041 <= code < 0xA4D0 or 0xF900 <= code < 0xFB00 or 0x20000 <= code < 0x323B0:
        return BETWEEN if code == 0x30FB else ALONE
    if 0xFE00 <= code < 0xFE10 or 0xFE20 <= code < 0xFE30 or 0x1F3FB <= code < 0x1F400:
        return MARK
    if 0xA4D0 <= code < 0xAC00 or 0xFB00 <= code < 0xFE00 or 0xFE70 <= code < 0xFEFF or 0x10000 <= code < 0x1F000:
        return WORD
    if 0xFF10 <= code < 0xFF1A or 0xFF21 <= code < 0xFF3B or 0xFF41 <= code < 0xFF5B:
        return WORD
    if 0xFF66 <= code < 0xFFDD:
        return ALONE
    return BETWEEN


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
def joined(data: np.ndarray, left: int, right: int) -> bool:
    """Whether the characters that end at `left` and begin at `right` would be in one word side by side."""
    code, _ = code_point(data, before(data, left))
    one, other = kind_of(code), kind_of(code_point(data, right)[0])
    return other == MARK or code == 0x200D or (other == WORD and one in (WORD, MARK))
