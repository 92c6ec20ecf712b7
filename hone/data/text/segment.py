"""Kernels that walk UTF-8: code points, white space, words and their hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from hone.data.text.hashing import mix
from hone.data.text.tables import LEAD_BYTE, WORD_BYTE

kernel = njit(cache=True, nogil=True, boundscheck=False, _nrt=False)
"""For functions that allocate nothing and are called by kernels only: without reference counts, which cost more than
the work where an array is handed to a small function for every word."""
inlined = njit(cache=True, nogil=True, boundscheck=False, _nrt=False, forceinline=True)
_SEED = np.uint64(0x243F6A8885A308D3)
_PLAIN = np.uint64(0x2121212121212121)
_HIGH_BITS = np.uint64(0x8080808080808080)
_LENGTH = np.uint64(0x9E3779B97F4A7C15)


@inlined
def fold(hashed: int, value: int) -> int:
    """`hashed` extended by `value`: the order of values matters."""
    hashed = (hashed ^ value) * np.uint64(0xD6E8FEB86659FD93)
    return hashed ^ (hashed >> np.uint64(32))


@inlined
def code_point(data: np.ndarray, place: int) -> tuple[int, int]:
    """(code point, bytes) of the character that begins at `place` of valid UTF-8."""
    first = np.int64(data[place])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(data[place + 1]) & 0x3F, 2
    middle = (np.int64(data[place + 1]) & 0x3F) << 6 | np.int64(data[place + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | middle, 3
    return (first & 0x07) << 18 | middle << 6 | np.int64(data[place + 3]) & 0x3F, 4


@kernel
def space_width(data: np.ndarray, place: int, kinds: np.ndarray, spaces: np.ndarray) -> int:
    """Bytes of the white space that begins at `place`; 0 when there is none."""
    kind = kinds[data[place]]
    if kind == WORD_BYTE:
        return 0
    if kind != LEAD_BYTE:
        return 1
    code, width = code_point(data, place)
    for space in spaces:
        if code == space:
            return width
    return 0


@intrinsic
def eight_bytes(typing: Any, data: Any, place: Any) -> Any:
    """data[place:place + 8] as one uint64, the first byte lowest; `data` uint8 [n], no check of bounds."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.gep(start, [args[1]])
        wide = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        return builder.load(wide, align=1)

    return types.uint64(data, types.int64), build


@intrinsic
def zeros_below(typing: Any, value: Any) -> Any:
    """Number of zero bits below the lowest one of a uint64; 64 for 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), build


@inlined
def word_end(data: np.ndarray, place: int, end: int, kinds: np.ndarray, spaces: np.ndarray) -> tuple[int, int]:
    """(end, hash) of the word that begins at `place`: it ends before white space or at `end`. The hash is never 0.

    Eight bytes are looked at in one step as long as they are plain ASCII above the space; others one by one.
    """
    first, hashed, packed, filled = place, _SEED, np.uint64(0), 0
    limit = len(data) - 8
    while place < end:
        if filled == 0 and place <= limit:
            chunk = eight_bytes(data, place)
            odd = ((chunk - _PLAIN) | chunk) & _HIGH_BITS
            filled = min(zeros_below(odd) >> 3, end - place)
            place += filled
            if filled == 8:
                hashed, filled = mix(hashed + chunk), 0
                continue
            packed = chunk & ((np.uint64(1) << np.uint64(8 * filled)) - np.uint64(1))
            if place == end:
                break
        byte = data[place]
        kind = kinds[byte]
        if kind != WORD_BYTE and (kind != LEAD_BYTE or space_width(data, place, kinds, spaces) > 0):
            break
        packed |= np.uint64(byte) << np.uint64(8 * filled)
        filled += 1
        place += 1
        if filled == 8:
            hashed, packed, filled = mix(hashed + packed), np.uint64(0), 0
    hashed = mix(hashed + packed + np.uint64(place - first) * _LENGTH)
    return place, max(hashed, np.uint64(1))


@inlined
def find(keys: np.ndarray, key: int) -> int:
    """The slot of `keys` (uint64 [power of two], 0 where empty) that holds `key`, or the empty one where it belongs."""
    mask = np.uint64(len(keys) - 1)
    slot = key & mask
    while keys[slot] != key and keys[slot] != np.uint64(0):
        slot = (slot + np.uint64(1)) & mask
    return slot
