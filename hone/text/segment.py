"""Kernels over UTF-8: code points, white space, words and their hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hone.text.compiled import inlined, kernel
from hone.text.hashing import mix
from hone.text.tables import LEAD_BYTES, SPACE_BYTES

_SEED = np.uint64(0x243F6A8885A308D3)
_LENGTH = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_EACH, _HIGHEST = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
BLOCK = 64
"""Bytes processed in one step."""


@inlined
def fold(hashed: int, value: int) -> int:
    """The hash `hashed` extended by `value`: the order of values matters."""
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


@inlined
def eight_bytes(data: np.ndarray, place: int) -> int:
    """data[place:place + 8] as one uint64, the first byte lowest; `data` uint8 [n], no check of bounds. One load, once compiled."""
    begin, packed = np.uint64(place), np.uint64(0)  # an index without a sign is not counted from the end
    for index in range(8):
        packed |= np.uint64(data[begin + np.uint64(index)]) << np.uint64(8 * index)
    return packed


@inlined
def zeros_below(value: int) -> int:
    """Number of zero bits below the lowest one of a uint64; 64 for 0: the ones of a word that has ones in their place.

    Counted in pairs, fours and bytes, which compiles to one instruction.
    """
    ones = (value & (~value + _ONE)) - _ONE
    ones -= ones >> _ONE & np.uint64(0x5555555555555555)
    ones = (ones & np.uint64(0x3333333333333333)) + (ones >> np.uint64(2) & np.uint64(0x3333333333333333))
    ones = ones + (ones >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64(ones * np.uint64(0x0101010101010101) >> np.uint64(56))


@inlined
def within(packed: int, low: int, high: int) -> int:
    """The highest bit of each of eight packed bytes that is `low` to `high`; both are below 128, or both from 128 on.

    Sums of seven bits each, which do not reach the next byte: one has its highest bit from `low` on, the other above `high`.
    """
    packed ^= _EACH * np.uint64(low & 128)
    seven = packed & ~_HIGHEST
    above = seven + _EACH * np.uint64(128 - (low & 127))
    beyond = seven + _EACH * np.uint64(127 - (high & 127))
    return above & ~beyond & ~packed & _HIGHEST


@inlined
def gathered(highest: int) -> int:
    """The highest bits of eight packed bytes as one byte, the first lowest: no two terms of the product meet."""
    return (highest >> np.uint64(7)) * np.uint64(0x0102040810204080) >> np.uint64(56)


@intrinsic
def fetch_ahead(typing: Any, data: Any, place: Any) -> Any:
    """Prefetches the first item of data[place], along the first axis; out of bounds it has no effect.

    Numba has no such call. It is worth 2 to 5 % of the signals where other processes use the same cache, and nothing alone.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> None:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(array.strides, 0)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        pointer = builder.gep(builder.bitcast(array.data, byte), [builder.mul(args[1], stride)])
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        builder.call(prefetch, [pointer, number(0), number(3), number(1)])  # for reading, to the nearest cache, data

    return types.void(data, types.int64), build


@kernel
def next_within(data: np.ndarray, place: int, end: int, low: int, high: int) -> int:
    """The offset of the first byte of data[place:end] from `low` to `high`; `end` when there is none."""
    low, high = np.uint8(low), np.uint8(high)
    while place + BLOCK <= end:
        first = np.uint8(BLOCK)
        for index in range(BLOCK):  # without a branch, so that it compiles to vector instructions
            byte = data[np.uint64(place) + np.uint64(index)]
            first = min(first, np.uint8(index) if (byte >= low) & (byte <= high) else np.uint8(BLOCK))
        if first < BLOCK:
            return place + np.int64(first)
        place += BLOCK
    while place < end and not low <= data[place] <= high:
        place += 1
    return place


@kernel
def _white(data: np.ndarray, place: int, size: int, spaces: np.ndarray) -> tuple[int, int]:
    """(which of data[place:place + 64] are white, as bits; bytes of a multi-byte space beyond them). From `size` on all are."""
    white, any_byte, leads = np.uint64(0), np.uint64(0), np.uint64(0)
    for index in range(0, BLOCK, 8):
        packed = eight_bytes(data, place + index)
        any_byte |= packed
        white |= gathered(within(packed, *SPACE_BYTES[0]) | within(packed, *SPACE_BYTES[1])) << np.uint64(index)
    if any_byte & _HIGHEST:
        for index in range(0, BLOCK, 8):
            packed = eight_bytes(data, place + index)
            leads |= gathered(within(packed, *LEAD_BYTES[0]) | within(packed, *LEAD_BYTES[1])) << np.uint64(index)
    if size < BLOCK:
        inside = (_ONE << np.uint64(size)) - _ONE
        white |= ~inside
        leads &= inside
    beyond = 0
    while leads:
        at = zeros_below(leads)
        leads &= leads - _ONE
        code, width = code_point(data, place + at)
        if code <= spaces[-1]:
            for space in spaces:
                if code == space:
                    white |= ((_ONE << np.uint64(width)) - _ONE) << np.uint64(at)
                    beyond = max(at + width - BLOCK, 0)
    return white, beyond


@kernel
def find_words(
    data: np.ndarray, end: int, spaces: np.ndarray, edges: np.ndarray, tail: np.ndarray, state: np.ndarray
) -> int:
    """Writes the begin and end of each next word of a text into `edges` (int64 [n]), until it has at least n - 64 or
    the text ends; returns their number. `tail` uint8 [72] is scratch.

    `state` int64 [4] starts as (first byte of the text, 1, 0, 0) and is passed from call to call: next byte, whether the
    one before is white, how many of the next belong to a multi-byte space, how many of `edges` are already filled: 1 when the last
    call ended inside a word, whose first byte its caller has moved to the front.
    """
    place, before, beyond, found = state[0], np.uint64(state[1]), state[2], state[3]
    while place < end and found < len(edges) - BLOCK:
        size = end - place
        belongs = (_ONE << np.uint64(beyond)) - _ONE
        if place + BLOCK <= len(data):
            white, beyond = _white(data, place, size, spaces)
        else:
            for index in range(size):
                tail[index] = data[place + index]
            white, beyond = _white(tail, 0, size, spaces)
        white |= belongs
        turns = white ^ (white << _ONE | before)
        before = white >> np.uint64(BLOCK - 1)
        while turns:
            edges[found] = place + zeros_below(turns)
            found += 1
            turns &= turns - _ONE
        place += BLOCK
    if place >= end and before == 0:
        edges[found] = end
        found += 1
        before = _ONE
    state[0], state[1], state[2], state[3] = place, np.int64(before), beyond, found & 1
    return found


@inlined
def word_key(data: np.ndarray, first: int, end: int) -> int:
    """Hash of the word data[first:end], never 0: of its bytes eight by eight, then of the rest and its length."""
    size = end - first
    hashed = _SEED
    if size < 16 and first + 16 <= len(data):  # without a branch by length, which cannot be predicted
        low, high = eight_bytes(data, first), eight_bytes(data, first + 8)
        hashed = mix(hashed + low) if size >= 8 else hashed
        packed = high if size >= 8 else low
    else:
        place = first
        while place + 8 <= end:
            hashed = mix(hashed + eight_bytes(data, place))
            place += 8
        packed = np.uint64(0)
        for index in range(end - place):
            packed |= np.uint64(data[place + index]) << np.uint64(8 * index)
    packed &= (_ONE << np.uint64(8 * (size & 7))) - _ONE
    return max(mix(hashed + packed + np.uint64(size) * _LENGTH), _ONE)


@inlined
def find(keys: np.ndarray, key: int) -> int:
    """The slot of `keys` (uint64 [power of two], 0 where empty) with `key`, or the empty one for it."""
    mask = np.uint64(len(keys) - 1)
    slot = key & mask
    while keys[slot] != key and keys[slot] != np.uint64(0):
        slot = (slot + np.uint64(1)) & mask
    return slot


@inlined
def place_of(hashed: int, hashes: np.ndarray) -> int:
    """The index of `hashed` in `hashes` (uint64, sorted), -1 if it is not there."""
    place = min(np.searchsorted(hashes, hashed), len(hashes) - 1)
    return place if hashes[place] == hashed else -1
