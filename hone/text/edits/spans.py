"""Kernels of edits: cut spans out of a batch of texts, and move spans to the borders of characters and words."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, kernel
from hone.text.units import POINT, is_joined, unit_of

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


@entry
def without(
    data: np.ndarray,
    offsets: np.ndarray,
    documents: np.ndarray,
    cut: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    fills: np.ndarray,
    written: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(data, offsets) of the texts without the spans [start, end) of documents `cut` (int64 [k], sorted).

    In the place of span j are the first `written[j]` (int64 [k]) bytes of `fills[j]` (uint8 [k, most]).
    """
    total = offsets[-1] - offsets[0] + written.sum()
    out = np.empty(total, np.uint8)
    places = np.zeros(len(offsets), np.int64)
    here = 0
    num_cuts = len(cut)
    j = 0
    for i in range(len(documents)):
        base, size = offsets[i], offsets[i + 1] - offsets[i]
        while j < num_cuts and cut[j] < documents[i]:
            j += 1
        done = 0
        while j < num_cuts and cut[j] == documents[i]:
            stop = min(start[j], size)
            for at in range(done, stop):
                out[here] = data[base + at]
                here += 1
            for at in range(written[j]):
                out[here] = fills[j, at]
                here += 1
            done = min(max(end[j], done), size)
            j += 1
        for at in range(done, size):
            out[here] = data[base + at]
            here += 1
        places[i + 1] = here
    return out[:here].copy(), places


@entry
def at_borders(
    data: np.ndarray,
    offsets: np.ndarray,
    documents: np.ndarray,
    cut: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    letters: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, end) of the spans, narrowed until they begin and end between words (and so between characters).

    Words are those of `letters`, `unit_table()`. They are cut as a whole or kept, and the words on both sides of a cut are not joined. A span that would lose more than
    half its bytes is left out. Spaces that a cut would leave at the end of a line or the text are cut too.
    """
    size = len(cut)
    out_document, out_start, out_end = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    count = 0
    i = 0
    for j in range(size):
        while documents[i] != cut[j]:
            i += 1
        base, stop = offsets[i], offsets[i + 1]
        left, right = base + start[j], base + end[j]
        while left < right and (data[left] & 0xC0 == 0x80 or (left > base and joined(data, left, left, letters))):
            left += 1
        while right > left and right < stop and (data[right] & 0xC0 == 0x80 or joined(data, right, right, letters)):
            right = before(data, right)
        if left > base and right < stop and left < right and joined(data, left, right, letters):
            left += size_at(data, left)
            while left < right and (joined(data, left, left, letters) or joined(data, left, right, letters)):
                left += size_at(data, left)
        if (right - left) * 2 < end[j] - start[j] or left >= right:
            continue
        if right == stop:
            while left > base and (data[left - 1] == 32 or 9 <= data[left - 1] <= 13):
                left -= 1
        elif data[right] == 10:
            while left > base and (data[left - 1] == 32 or data[left - 1] == 9):
                left -= 1
        out_document[count], out_start[count], out_end[count] = cut[j], left - base, right - base
        count += 1
    return out_document[:count], out_start[:count], out_end[:count]
