"""Kernels of line deduplication: lines, paragraphs and sentences with their hashes, and which copies to cut."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry

LINES, PARAGRAPHS, SENTENCES = 0, 1, 2

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINAL = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


def _normal_form() -> np.ndarray:
    """uint8 [256]: the byte that each byte is hashed as; 0 for bytes that are ignored."""
    table = np.arange(256).astype(np.uint8)
    table[ord("A") : ord("Z") + 1] += 32
    table[ord("0") : ord("9") + 1] = ord("0")
    for byte in range(128):
        if not chr(byte).isalnum():
            table[byte] = 0
    return table


_NORMAL = _normal_form()


@entry
def _is_space(byte: int) -> bool:
    return byte == 32 or (9 <= byte <= 13)


@entry
def _ends_sentence(data: np.ndarray, at: int, end: int) -> int:
    """The offset after the end of sentence that begins at `at`, or 0: marks, closing quotes, then a space or the text's end."""
    byte = data[at]
    if byte == 0xE3 and at + 2 < end and data[at + 1] == 0x80 and data[at + 2] == 0x82:  # ideographic full stop
        return at + 3
    if byte == 0xEF and at + 2 < end and data[at + 1] == 0xBC and (data[at + 2] == 0x81 or data[at + 2] == 0x9F):
        return at + 3  # full-width ! and ?
    if byte != 46 and byte != 33 and byte != 63:
        return 0
    while at < end and (data[at] == 46 or data[at] == 33 or data[at] == 63):
        at += 1
    while at < end:
        if data[at] == 34 or data[at] == 39 or data[at] == 41 or data[at] == 93:
            at += 1
        elif at + 2 < end and data[at] == 0xE2 and data[at + 1] == 0x80 and 0x99 <= data[at + 2] <= 0x9D:
            at += 3
        else:
            break
    return at if at == end or _is_space(data[at]) else 0


@entry
def _next_end(data: np.ndarray, at: int, end: int, unit: int) -> int:
    """Where the unit that begins at `at` ends."""
    while at < end:
        if data[at] == 10:
            if unit != 1:
                return at
            ahead = at + 1
            while ahead < end and (data[ahead] == 32 or data[ahead] == 9):
                ahead += 1
            if ahead == end or data[ahead] == 10:
                return at
        elif unit == 2:
            stop = _ends_sentence(data, at, end)
            if stop:
                return stop
        at += 1
    return end


@entry
def units_of(
    data: np.ndarray, offsets: np.ndarray, unit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, start, end, hash, chars) of every unit that is not blank, in order.

    `start` and `end` are byte offsets. The hash covers letters without case, and all digits as one; ASCII punctuation and
    spaces are ignored; `chars` counts the hashed characters without digits.
    """
    most = len(offsets) - 1
    for at in range(offsets[0], offsets[-1]):
        byte = data[at]
        if byte == 10 or (unit == 2 and (byte == 46 or byte == 33 or byte == 63 or byte == 0xE3 or byte == 0xEF)):
            most += 1
    text = np.empty(most, np.int64)
    starts = np.empty(most, np.int64)
    ends = np.empty(most, np.int64)
    hashes = np.empty(most, np.uint64)
    chars = np.empty(most, np.int64)
    count = 0
    for number in range(len(offsets) - 1):
        base, end = offsets[number], offsets[number + 1]
        at = base
        while True:
            while at < end and _is_space(data[at]):
                at += 1
            if at >= end:
                break
            line = at
            while unit != 2 and line > base and data[line - 1] != 10:  # indentation is part of its line
                line -= 1
            stop = _next_end(data, at, end, unit)
            value = np.uint64(0)
            seen = 0
            for place in range(at, stop):
                byte = _NORMAL[data[place]]
                if byte:
                    value = (value ^ np.uint64(byte)) * _MULTIPLIER
                    value ^= value >> _SHIFT
                    seen += (byte < 0x80 and byte != 48) or byte >= 0xC0
            text[count], starts[count], ends[count] = number, line - base, stop - base
            hashes[count], chars[count] = value, seen
            count += 1
            at = stop
    return text[:count], starts[:count], ends[:count], hashes[:count], chars[:count]


@entry
def windows_of(
    text: np.ndarray, hashes: np.ndarray, chars: np.ndarray, window: int, min_chars: int
) -> tuple[np.ndarray, np.ndarray]:
    """(first unit int64, hash) of every run of `window` units of one text with at least `min_chars` characters together."""
    first = np.empty(len(text), np.int64)
    keys = np.empty(len(text), np.uint64)
    count = 0
    for unit in range(len(text) - window + 1):
        if text[unit] != text[unit + window - 1]:
            continue
        value = np.uint64(window)
        seen = 0
        for place in range(unit, unit + window):
            value = (value ^ hashes[place]) * _FINAL
            value ^= value >> _SHIFT
            seen += chars[place]
        if seen >= min_chars:
            first[count], keys[count] = unit, value
            count += 1
    return first[:count], keys[:count]


@entry
def later_copies(
    key: np.ndarray, rank: np.ndarray, unit: np.ndarray, window: int, min_documents: int, keep: int
) -> np.ndarray:
    """bool [k]: which windows to cut. All are sorted by (key, rank, unit); `rank` is the order of documents.

    The first `keep` copies of a key are kept, and so is one that overlaps the last of those.
    """
    gone = np.zeros(len(key), np.bool_)
    start = 0
    while start < len(key):
        end = start + 1
        documents = 1
        while end < len(key) and key[end] == key[start]:
            documents += rank[end] != rank[end - 1]
            end += 1
        if end - start > 1 and documents >= min_documents:
            kept = 0
            last = -1
            for place in range(start, end):
                overlaps = last >= 0 and rank[place] == rank[last] and unit[place] < unit[last] + window
                if overlaps:
                    continue
                if kept < keep:
                    kept += 1
                    last = place
                else:
                    gone[place] = True
        start = end
    return gone
