"""Hashes of words and word n-grams of UTF-8 bytes, which near-duplicate detection compares.

A word is a longest run of letters, digits and underscores (a match of \\w+), in lower case letter
by letter. Its hash is FNV-1a over code points, finished by `mix`. The hash of n words in a row is `mix` of a polynomial
of theirs, a rolling hash: its update takes the same time for every n. All arithmetic is modulo 2^64.
"""

from __future__ import annotations

import functools

import numpy as np

from hone.data.text.compiled import inlined, kernel

BASIS = np.uint64(0xCBF29CE484222325)
PRIME = np.uint64(0x00000100000001B3)
ROLL = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_TABLE_SIZE = 0x34000
"""Code points above are only marks, tags and private-use letters."""
CHUNK = 4096
"""Shingles per call of the caller's loop: they fit the L1 cache, whatever the document's size."""


@functools.cache
def word_table() -> np.ndarray:
    """For each code point (uint32 [212992]) 0 if it ends a word, else the code point of its lower case.

    Of a lower case with several letters the first is taken; the final sigma is a sigma.
    """
    points = np.arange(_TABLE_SIZE, dtype=np.uint32)
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


@inlined
def _letter(data, place, end, table):
    """(the value of `table` for the character that begins at `place`, its bytes)."""
    byte = data[place]
    if byte < 128:
        return table[byte], np.int64(1)
    point, step = code_point(data, place, end)
    return (table[point] if point < _TABLE_SIZE else np.uint32(0)), step


@kernel
def next_shingles(data, end, table, ring, state, out):
    """Writes hashes of the next runs of len(ring) words into `out` (uint64); returns how many, 0 at the text's end.

    `state` uint64 [3] starts as (the text's first byte, 0, 0), `ring` uint64 [n] as zeros; both are passed from call to
    call. A text of fewer than n words has one run of all of them.
    """
    n = len(ring)
    place, num_words, total = np.int64(state[0]), np.int64(state[1]), state[2]
    power = roll_power(n)
    slot = num_words % n
    count = 0
    while place < end:
        letter = np.uint32(0)
        while place < end:  # characters before the word
            letter, step = _letter(data, place, end, table)
            place += step
            if letter != 0:
                break
        if letter == 0:
            break
        word = BASIS
        while True:
            word = (word ^ np.uint64(letter)) * PRIME
            if place >= end:
                break
            letter, step = _letter(data, place, end, table)
            place += step
            if letter == 0:
                break
        word = mix(word)
        total = total * ROLL + word - ring[slot] * power
        ring[slot] = word
        slot = slot + 1 if slot + 1 < n else 0
        num_words += 1
        if num_words >= n:
            out[count] = mix(total)
            count += 1
            if count == len(out):
                break
    if place >= end and 0 < num_words < n and count < len(out):
        out[count] = mix(total)
        count += 1
        num_words = n
    state[0], state[1], state[2] = np.uint64(place), np.uint64(num_words), total
    return count
