"""Kernels that compute MinHash signatures and SimHash fingerprints of texts, from shingles: hashes of runs of n words (units.py).

The hash of n words in a row is `mix` of a polynomial of theirs, a rolling hash: its update takes the same time for
every n.
"""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, kernel
from hone.text.hashing import ROLL, mix, roll_power
from hone.text.units import next_word

CHUNK = 4096
"""Shingles per call of the caller's loop: they fit the L1 cache, whatever the document's size."""


@kernel
def next_shingles(data, end, table, ring, state, out):
    """Writes hashes of the next runs of len(ring) words into `out` (uint64); returns how many, 0 at the text's end.

    `table` is `unit_table()`. `state` uint64 [3] starts as (the text's first byte, 0, 0), `ring` uint64 [n] as zeros; both are
    passed from call to call. A text of fewer than n words has one run of all of them.
    """
    n = len(ring)
    place, num_words, total = np.int64(state[0]), np.int64(state[1]), state[2]
    power = roll_power(n)
    slot = num_words % n
    count = 0
    while place < end:
        begin, _, place, word = next_word(data, place, end, table)
        if begin == end:
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


@entry
def signatures(data, offsets, n, table, factors, shifts):
    """MinHash signatures (uint32 [num_texts, len(factors)]) and whether each text has a word (bool [num_texts]).

    Function i maps the high half x of a shingle's hash to factors[i] * x + shifts[i] mod 2^32; its value is the minimum
    over the text's shingles. With odd factors it is a bijection.
    """
    num_texts, width = len(offsets) - 1, len(factors)
    result = np.full((num_texts, width), np.uint32(0xFFFFFFFF), np.uint32)
    worded = np.zeros(num_texts, np.bool_)
    found = np.empty(CHUNK, np.uint64)
    values = np.empty(CHUNK, np.uint32)
    ring = np.empty(n, np.uint64)
    state = np.empty(3, np.uint64)
    for text in range(num_texts):
        ring[:] = np.uint64(0)
        state[0], state[1], state[2] = np.uint64(offsets[text]), np.uint64(0), np.uint64(0)
        while True:
            count = next_shingles(data, offsets[text + 1], table, ring, state, found)
            if count == 0:
                break
            worded[text] = True
            for i in range(count):
                values[i] = np.uint32(found[i] >> np.uint64(32))
            _lower(values, count, factors, shifts, result[text])
    return result, worded


@kernel
def _lower(values, count, factors, shifts, least):
    """Updates the minima with the first `count` of `values`; the inner loop is written so that it compiles to vector instructions."""
    for function in range(len(factors)):
        factor, shift, minimum = factors[function], shifts[function], least[function]
        for i in range(count):
            image = np.uint32(np.uint32(factor * values[i]) + shift)
            minimum = image if image < minimum else minimum
        least[function] = minimum


@entry
def band_keys(signed, rows):
    """A 64-bit hash of each band of each signature: uint64 [bands, n] from uint32 [n, bands * rows]."""
    bands = signed.shape[1] // rows
    keys = np.empty((bands, len(signed)), np.uint64)
    for text in range(len(signed)):
        for band in range(bands):
            key = np.uint64(band + 1)
            for row in range(band * rows, (band + 1) * rows):
                key = mix(key ^ np.uint64(signed[text, row])) + np.uint64(0x9E3779B97F4A7C15)
            keys[band, text] = key
    return keys


@entry
def fingerprints(data, offsets, n, table):
    """SimHash fingerprints (uint64 [num_texts]) and whether each text has a word (bool [num_texts]).

    Bit i is set when it is set in more than half of the hashes of the text's shingles, counted with repetition.
    """
    num_texts = len(offsets) - 1
    result = np.zeros(num_texts, np.uint64)
    worded = np.zeros(num_texts, np.bool_)
    found = np.empty(CHUNK, np.uint64)
    ring = np.empty(n, np.uint64)
    state = np.empty(3, np.uint64)
    votes = np.empty(64, np.int64)
    for text in range(num_texts):
        ring[:] = np.uint64(0)
        state[0], state[1], state[2] = np.uint64(offsets[text]), np.uint64(0), np.uint64(0)
        votes[:] = 0
        total = 0
        while True:
            count = next_shingles(data, offsets[text + 1], table, ring, state, found)
            if count == 0:
                break
            worded[text] = True
            total += count
            for i in range(count):
                for bit in range(64):
                    votes[bit] += np.int64((found[i] >> np.uint64(bit)) & np.uint64(1))
        for bit in range(64):
            if 2 * votes[bit] > total:
                result[text] |= np.uint64(1) << np.uint64(bit)
    return result, worded
