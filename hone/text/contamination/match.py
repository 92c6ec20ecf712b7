"""Kernels of decontamination: hashes of a text's words, their n-grams, and lookups of n-grams in a table."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry
from hone.text.units import next_word, unit_table

__all__ = ["grams_of", "hits_of", "table_of", "unit_table"]

_BASE = np.uint64(0x9FB21C651E98DF25)
_FINAL = np.uint64(0xD6E8FEB86659FD93)
_LENGTH = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@entry
def _mixed(value: np.uint64) -> np.uint64:
    """A bijection of 64-bit numbers in which every input bit changes about half of the output bits."""
    value = (value ^ (value >> _SHIFT)) * _FINAL
    return value ^ (value >> _SHIFT)


@entry
def _words_of(data: np.ndarray, hashes: np.ndarray, start: np.ndarray, end: np.ndarray, letters: np.ndarray) -> int:
    """Writes the hash and the position of every word of one text; returns the number of words. `letters` is `unit_table()`."""
    count, place = 0, 0
    while True:
        begin, stop, place, value = next_word(data, place, len(data), letters)
        if begin == len(data):
            return count
        start[count], end[count], hashes[count] = begin, stop, _mixed(value)
        count += 1


@entry
def _key(value: np.uint64, length: int) -> np.uint64:
    """The key of an n-gram; never 0, which marks an empty slot of the table."""
    key = _mixed(value + np.uint64(length) * _LENGTH)
    return key if key != np.uint64(0) else np.uint64(1)


@entry
def _power(length: int) -> np.uint64:
    power = np.uint64(1)
    for _ in range(length):
        power *= _BASE
    return power


@entry
def _longest(offsets: np.ndarray) -> int:
    most = 0
    for number in range(len(offsets) - 1):
        most = max(most, offsets[number + 1] - offsets[number])
    return most


@entry
def grams_of(
    data: np.ndarray, offsets: np.ndarray, length: int, shortest: int, letters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(text, key, words) of every n-gram of `length` words of every text; a shorter text is one n-gram of all its words.

    Texts of fewer than `shortest` words have no n-gram.
    """
    room = _longest(offsets) + 1
    hashes, start, end = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    most = (offsets[-1] - offsets[0]) + len(offsets)
    text, key, words = np.empty(most, np.int64), np.empty(most, np.uint64), np.empty(most, np.int64)
    total = 0
    for number in range(len(offsets) - 1):
        count = _words_of(data[offsets[number] : offsets[number + 1]], hashes, start, end, letters)
        size = min(length, count)
        if count < shortest:
            continue
        power = _power(size)
        value = np.uint64(0)
        for place in range(count):
            value = value * _BASE + hashes[place]
            if place >= size:
                value -= hashes[place - size] * power
            if place >= size - 1:
                text[total], key[total], words[total] = number, _key(value, size), size
                total += 1
    return text[:total], key[:total], words[:total]


@entry
def table_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(table, filter) of `keys` (uint64, none 0): an open-addressing hash table, and a bitmap that rejects most other keys early."""
    size = 16
    while size < 3 * len(keys):
        size *= 2
    table, bits = np.zeros(size, np.uint64), np.zeros(size // 16, np.uint64)
    for key in keys:
        at = key & np.uint64(size - 1)
        while table[at] != np.uint64(0) and table[at] != key:
            at = (at + np.uint64(1)) & np.uint64(size - 1)
        table[at] = key
        place = (key >> _SHIFT) & np.uint64(size * 4 - 1)
        bits[place >> np.uint64(6)] |= np.uint64(1) << (place & np.uint64(63))
    return table, bits


@entry
def hits_of(
    data: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, table: np.ndarray, bits: np.ndarray, letters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, start, end, key) of every n-gram of `lengths` words that is in the table; start and end are byte offsets in the text."""
    room = _longest(offsets) + 1
    hashes, start, end = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    powers = np.empty(len(lengths), np.uint64)
    for number in range(len(lengths)):
        powers[number] = _power(lengths[number])
    room = 1024
    found = np.empty((4, room), np.uint64)
    total = 0
    for number in range(len(offsets) - 1):
        count = _words_of(data[offsets[number] : offsets[number + 1]], hashes, start, end, letters)
        for row in range(len(lengths)):
            while True:
                more = _hits_of_one(
                    hashes[:count], start, end, lengths[row], powers[row], table, bits, found[1:, total:]
                )
                if more >= 0:
                    break
                room *= 2
                wider = np.empty((4, room), np.uint64)
                wider[:, :total] = found[:, :total]
                found = wider
            found[0, total : total + more] = number
            total += more
    part = found[:3, :total].astype(np.int64)
    return part[0], part[1], part[2], found[3, :total].copy()


@entry
def _hits_of_one(
    hashes: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    length: int,
    power: np.uint64,
    table: np.ndarray,
    bits: np.ndarray,
    found: np.ndarray,
) -> int:
    """Writes (start, end, key) of the n-grams of one text that are in the table; returns their number, -1 when the arrays are full."""
    mask, bit_mask = np.uint64(len(table) - 1), np.uint64(len(bits) * 64 - 1)
    value = np.uint64(0)
    total = 0
    for place in range(len(hashes)):
        value = value * _BASE + hashes[place]
        if place >= length:
            value -= hashes[place - length] * power
        if place < length - 1:
            continue
        key = _key(value, length)
        bit = (key >> _SHIFT) & bit_mask
        if not (bits[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1):
            continue
        at = key & mask
        while table[at] != np.uint64(0) and table[at] != key:
            at = (at + np.uint64(1)) & mask
        if table[at] == key:
            if total == found.shape[1]:
                return -1
            found[0, total], found[1, total] = start[place - length + 1], end[place]
            found[2, total] = key
            total += 1
    return total
