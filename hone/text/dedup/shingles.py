"""Shingles: hashes of runs of n words (units.py) of UTF-8 bytes, which near-duplicate detection compares.

The hash of n words in a row is `mix` of a polynomial of theirs, a rolling hash: its update takes the same time for
every n.
"""

from __future__ import annotations

import numpy as np

from hone.text.compiled import kernel
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
