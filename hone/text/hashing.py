"""Hashes: of letters to words (FNV-1a over code points), finished by `mix`, and the table of letters. All arithmetic is modulo 2^64."""

from __future__ import annotations

import functools

import numpy as np

from hone.text.compiled import kernel

BASIS = np.uint64(0xCBF29CE484222325)
PRIME = np.uint64(0x00000100000001B3)
ROLL = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
TABLE_SIZE = 0x34000
"""Code points above are only marks, tags and private-use letters."""


@functools.cache
def word_table() -> np.ndarray:
    """For each code point (uint32 [212992]) 0 if it ends a word, else the code point of its lower case.

    Of a lower case with several letters the first is taken; the final sigma is a sigma.
    """
    points = np.arange(TABLE_SIZE, dtype=np.uint32)
    letters = points.view("U1")
    table = np.where(np.char.isalnum(letters) | (letters == "_"), points, np.uint32(0)).astype(np.uint32)
    for point in np.flatnonzero(np.char.isupper(letters) | np.char.istitle(letters)):
        if table[point]:
            table[point] = ord(chr(point).lower()[0])
    table[ord("ς")] = ord("σ")
    table.flags.writeable = False  # cached per process: small shards take less time than this table
    return table


@kernel
def mix(value):
    """The finalizer of SplitMix64 (Steele et al. 2014): each input bit of a uint64 changes about half of the output bits."""
    value = np.uint64(value)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@kernel
def code_point(data, place, end):
    """(code point, bytes) of the UTF-8 sequence that begins with a byte above 127 at `place`; 0 for one cut off by `end`."""
    lead = np.int64(data[place])
    if lead < 0xE0:
        if place + 2 > end:
            return np.int64(0), np.int64(1)
        return (lead & 0x1F) << 6 | (np.int64(data[place + 1]) & 0x3F), np.int64(2)
    if lead < 0xF0:
        if place + 3 > end:
            return np.int64(0), np.int64(1)
        low = (np.int64(data[place + 1]) & 0x3F) << 6 | (np.int64(data[place + 2]) & 0x3F)
        return (lead & 0x0F) << 12 | low, np.int64(3)
    if place + 4 > end:
        return np.int64(0), np.int64(1)
    low = (np.int64(data[place + 2]) & 0x3F) << 6 | (np.int64(data[place + 3]) & 0x3F)
    return (lead & 0x07) << 18 | (np.int64(data[place + 1]) & 0x3F) << 12 | low, np.int64(4)


@kernel
def roll_power(n):
    """ROLL to the power n: the factor of the oldest word when it leaves a run of n."""
    power = _ONE
    for _ in range(n):
        power *= ROLL
    return power
