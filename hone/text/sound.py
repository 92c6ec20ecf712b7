"""Kernels that find the texts of a batch which need no change to be stored, and tidy line ends and blanks of the others."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from hone.text.compiled import entry, inlined

FINE, UNTIDY, ODD = 0, 1, 2
CHANGES, FIRST, SECOND, TAIL, SPACE = 1, 2, 4, 8, 16


@cache
def plain_bytes() -> np.ndarray:
    """bool [256]: bytes that need no check: ASCII except NUL and line ends."""
    plain = np.zeros(256, bool)
    plain[1:128] = True
    plain[[10, 13]] = False
    return plain


@cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """(marks, classes), uint8 [65536] each: flags of a character's special properties, its canonical combining class.

    CHANGES: NFC changes it, or it is U+FFFD or a control character. SECOND: it may compose with the character before it, a FIRST.
    TAIL: looks like a byte of UTF-8 that was read as Windows-1252 or Latin-1. SPACE: white space.
    """
    marks, classes = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
    for code in range(0x80, 1 << 16):
        character = chr(code)
        classes[code] = unicodedata.combining(character)
        if character.isspace():
            marks[code] |= SPACE
        parts = unicodedata.decomposition(character)
        if not parts or parts.startswith("<"):
            continue
        codes = [int(part, 16) for part in parts.split()]
        if unicodedata.normalize("NFC", character) != character:
            marks[code] |= CHANGES
        elif len(codes) == 2:
            marks[codes[0]] |= FIRST
            marks[codes[1]] |= SECOND
    marks[0x1100:0x1113] |= FIRST  # Korean syllables are composed by rule
    marks[0xAC00:0xD7A4:28] |= FIRST
    marks[0x1161:0x11C3] |= SECOND
    marks[0xFFFD] |= CHANGES
    marks[0x80:0xA0] |= CHANGES
    marks[0x80:0xC0] |= TAIL
    for byte in range(0x80, 0xA0):
        marks[ord(bytes([byte]).decode("cp1252", "ignore") or chr(byte))] |= TAIL
    return marks, classes


@entry
def look(data, offsets, plain, marks, classes):
    """uint8 [n]: FINE, UNTIDY (other line ends, blanks at the end of a line, line ends or space around the text) or ODD.

    ODD: NUL, invalid UTF-8, characters that NFC may change or that look like mojibake, other than ASCII space at the end.
    """
    num = len(offsets) - 1
    states = np.zeros(num, np.uint8)
    for index in range(num):
        begin, end = offsets[index], offsets[index + 1]
        place = begin
        state = UNTIDY if place == end or data[place] == 10 else FINE
        before, older, after, space_end = 0, 0, place, place
        while place < end:
            code = int(data[place])
            if plain[code]:
                place += 1
                continue
            if code < 128:
                if code == 0:
                    state = ODD
                    break
                if code == 13 or (place > begin and (data[place - 1] == 32 or data[place - 1] == 9)):
                    state = UNTIDY
                place += 1
                continue
            width = 2 if 0xC2 <= code < 0xE0 else 3 if 0xE0 <= code < 0xF0 else 4 if 0xF0 <= code < 0xF5 else 0
            if width == 0 or place + width > end:
                state = ODD
                break
            code = code & (0x7F >> width)
            for step in range(1, width):
                byte = int(data[place + step])
                if byte & 0xC0 != 0x80:
                    state = ODD
                code = code << 6 | (byte & 0x3F)
            if state == ODD:
                break
            if place != after:
                before, older = int(data[place - 1]) if place > begin else 0, 0
            place += width
            after = place
            if code >= 1 << 16:  # emoji, mathematical letters, rare Chinese characters never change
                if not (0x1F000 <= code < 0x1FB00 or 0x1D400 <= code < 0x1D800 or 0x20000 <= code < 0x2F800):
                    state = ODD
                    break
                older, before = before, 0
                continue
            mark = marks[code]
            if mark & CHANGES or 0xD800 <= code < 0xE000 or (width == 3 and code < 0x800):
                state = ODD
                break
            if mark & SECOND and (marks[before] & FIRST or classes[before]):
                state = ODD
                break
            if classes[code] and classes[before] > classes[code]:
                state = ODD
                break
            if mark & TAIL and (0xC2 <= before < 0xE0 or (0xE0 <= older <= 0xF4 and marks[before] & TAIL)):
                state = ODD
                break
            if mark & SPACE:
                space_end = place
            older, before = before, code
        if state != ODD and end > begin:
            last = end
            while last > begin and _is_space(data[last - 1]):
                last -= 1
            if last < end:
                state = UNTIDY
            if space_end == last and last > begin:
                state = ODD
        states[index] = state
    return states


@inlined
def _is_space(byte):
    """Whether Python strips this ASCII character."""
    return byte == 32 or (9 <= byte <= 13) or (28 <= byte <= 31)


@entry
def tidy(data, offsets, states, new, starts):
    """(uint8 [m], int64 [n + 1]): the texts concatenated, UNTIDY ones tidied, ODD ones replaced by those of `new` at `starts`."""
    num = len(offsets) - 1
    out = np.empty(offsets[num] - offsets[0] + len(new), np.uint8)
    places = np.zeros(num + 1, np.int64)
    to = 0
    odd = 0
    index = 0
    while index < num:
        begin, end = offsets[index], offsets[index + 1]
        if states[index] == FINE:
            first = index
            while index < num and states[index] == FINE:
                places[index + 1] = to + offsets[index + 1] - begin
                index += 1
            size = offsets[index] - offsets[first]
            out[to : to + size] = data[begin : begin + size]
            to += size
            continue
        if states[index] == ODD:
            size = starts[odd + 1] - starts[odd]
            out[to : to + size] = new[starts[odd] : starts[odd + 1]]
            to += size
            odd += 1
        else:
            first = to
            place = begin
            while place < end:
                byte = data[place]
                if byte == 13 or byte == 10:
                    if byte == 13 and place + 1 < end and data[place + 1] == 10:
                        place += 1
                    while to > first and (out[to - 1] == 32 or out[to - 1] == 9):
                        to -= 1
                    if to > first:
                        out[to] = 10
                        to += 1
                else:
                    out[to] = byte
                    to += 1
                place += 1
            while to > first and _is_space(out[to - 1]):
                to -= 1
        index += 1
        places[index] = to
    return out, places
