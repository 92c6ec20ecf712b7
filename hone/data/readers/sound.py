"""Sound: which texts of a batch stand as they are, found by one pass over their bytes; the others are looked at one by one."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from numba import njit

from hone.data.readers.documents import Fault, settle
from hone.data.text.batch import Texts

_DOUBTFUL, _TAIL, _SPACE = 1, 2, 4


def settle_batch(texts: Texts) -> tuple[Texts, np.ndarray, list[Fault]]:
    """(the documents among `texts` as hone keeps them, their indices int64 [k], a Fault for each of the others).

    What documents.settle says of each text; the texts themselves are not copied when all stand as they are.
    """
    flags = doubtful(texts.data, texts.offsets, _table())
    odd = np.flatnonzero(flags)
    if not len(odd):
        return texts, np.arange(texts.num_texts), []
    keep = np.ones(texts.num_texts, bool)
    sizes = np.diff(texts.offsets)
    pieces: list = []
    faults: list[Fault] = []
    done = 0
    for index in odd:
        begin, end = texts.offsets[index], texts.offsets[index + 1]
        pieces.append(memoryview(texts.data[texts.offsets[done] : begin]))
        done = index + 1
        raw = bytes(texts.data[begin:end])
        try:
            reason, text = settle(raw.decode())
        except UnicodeDecodeError:
            reason, text = "wrong_encoding", raw[:1000].decode("utf8", "replace")
        if reason:
            faults.append(Fault(reason, "" if reason == "empty" else text, len(raw)))
            keep[index] = False
            continue
        whole = text.encode()
        pieces.append(whole)
        sizes[index] = len(whole)
    pieces.append(memoryview(texts.data[texts.offsets[done] : texts.offsets[-1]]))
    offsets = np.zeros(int(keep.sum()) + 1, np.int64)
    np.cumsum(sizes[keep], out=offsets[1:])
    return Texts(np.frombuffer(b"".join(pieces), np.uint8), offsets), np.flatnonzero(keep), faults


@cache
def _table() -> np.ndarray:
    """uint8 [65536]: for each character whether it may change under NFC or is U+FFFD, looks like a byte of UTF-8 that was
    read as Windows-1252 or Latin-1, is white space."""
    table = np.zeros(1 << 16, np.uint8)
    for code in range(0x80, 1 << 16):
        character = chr(code)
        parts = unicodedata.decomposition(character)
        if parts and not parts.startswith("<"):
            codes = [int(part, 16) for part in parts.split()]
            if unicodedata.normalize("NFC", character) != character:
                table[code] |= _DOUBTFUL
            if len(codes) > 1 and codes[1] < 1 << 16:  # may melt into the character before it
                table[codes[1]] |= _DOUBTFUL
        if unicodedata.combining(character):
            table[code] |= _DOUBTFUL
        if character.isspace():
            table[code] |= _SPACE
    table[0x1160:0x1200] |= _DOUBTFUL  # vowels and endings of Korean syllables
    table[0xFFFD] |= _DOUBTFUL
    table[0x80:0xC0] |= _TAIL
    for byte in range(0x80, 0xA0):
        table[ord(bytes([byte]).decode("cp1252", "ignore") or chr(byte))] |= _TAIL
    return table


@njit(cache=True, nogil=True, boundscheck=False)
def doubtful(data, offsets, table):
    """uint8 [n]: 1 where a text is not plainly sound: empty, NUL, other line ends, space at the end of a line or around it,
    invalid UTF-8, characters that NFC may change or that look like mojibake."""
    num = len(offsets) - 1
    flags = np.zeros(num, np.uint8)
    for index in range(num):
        place, end = offsets[index], offsets[index + 1]
        if place == end or data[place] == 10:
            flags[index] = 1
            continue
        before, older = 0, 0
        flag = False
        while place < end:
            code = int(data[place])
            if code < 128:
                if code < 14 and (code == 0 or code == 13 or (code == 10 and (before == 32 or before == 9))):
                    flag = True
                    break
                place += 1
                older, before = before, code
                continue
            width = 2 if 0xC2 <= code < 0xE0 else 3 if 0xE0 <= code < 0xF0 else 4 if 0xF0 <= code < 0xF5 else 0
            if width == 0 or place + width > end:
                flag = True
                break
            code = code & (0x7F >> width)
            for step in range(1, width):
                byte = int(data[place + step])
                if byte & 0xC0 != 0x80:
                    flag = True
                code = code << 6 | (byte & 0x3F)
            place += width
            if flag:
                break
            if code >= 1 << 16:  # emoji, mathematical letters, rare Chinese characters never change
                if not (0x1F000 <= code < 0x1FB00 or 0x1D400 <= code < 0x1D800 or 0x20000 <= code < 0x2F800):
                    flag = True
                    break
            else:
                marks = table[code]
                if marks & 1 or 0xD800 <= code < 0xE000 or (width == 3 and code < 0x800):
                    flag = True
                    break
                if marks & 2 and (
                    0xC2 <= before < 0xE0
                    or (0xE0 <= older < 0xF0 and before >= 0x80 and before < 1 << 16 and table[before] & 2 != 0)
                ):
                    flag = True
                    break
            older, before = before, code
        if not flag:
            if before < 128:
                flag = before == 32 or 9 <= before < 14 or 28 <= before < 32
            elif before < 1 << 16:
                flag = table[before] & 4 != 0
        flags[index] = flag
    return flags
