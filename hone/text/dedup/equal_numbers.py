"""Kernels that find equal numbers without sorting them."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, kernel
from hone.text.dedup.union_find import join

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: multiplying by it makes the high bits differ also where only low bits of the numbers do."""
_BUCKET_BITS = 15
"""About 2^15 numbers, their indices and a hash table of them fit the L2 cache; fastest from 0.3 to 8 million numbers."""


@entry
def join_equal(parents, numbers):
    """Joins in `parents` the indices of equal `numbers` (uint64 [n]).

    The numbers are distributed over buckets that fit the cache, and each bucket is joined with a hash table: a third of
    the time of sorting all (22 against 72 ns a number at 3 million of them).
    """
    bits = 0
    while len(numbers) >> bits > 1 << _BUCKET_BITS:
        bits += 1
    held, places, borders = np.empty_like(numbers), np.empty_like(parents), np.zeros((1 << bits) + 1, np.int64)
    for number in numbers:
        borders[_bucket(number, bits) + 1] += 1
    largest = 0
    for bucket in range(1 << bits):
        largest = max(largest, borders[bucket + 1])
        borders[bucket + 1] += borders[bucket]
    following = borders[:-1].copy()
    for place in range(len(numbers)):
        bucket = _bucket(numbers[place], bits)
        held[following[bucket]] = numbers[place]
        places[following[bucket]] = place
        following[bucket] += 1
    slots = np.empty(1 << _table_bits(largest), parents.dtype)
    ones, others = np.empty(largest, parents.dtype), np.empty(largest, parents.dtype)
    for bucket in range(1 << bits):
        begin, end = borders[bucket], borders[bucket + 1]
        size = _table_bits(end - begin)
        slots[: 1 << size] = -1
        met = 0
        for at in range(begin, end):
            slot = (held[at] * _SPREAD << np.uint64(bits)) >> np.uint64(64 - size)
            while slots[slot] >= 0 and held[begin + slots[slot]] != held[at]:
                slot = (slot + np.uint64(1)) & np.uint64((1 << size) - 1)
            if slots[slot] < 0:
                slots[slot] = at - begin
            else:
                ones[met], others[met] = places[begin + slots[slot]], places[at]
                met += 1
        join(parents, ones[:met], others[:met])


@kernel
def _bucket(number, bits):
    """The first `bits` bits of the hash of `number`."""
    return np.int64((number * _SPREAD >> np.uint64(1)) >> np.uint64(63 - bits))


@kernel
def _table_bits(count):
    """log2 of the number of slots of a table that is at most half full."""
    bits = 4
    while 1 << bits < 2 * count:
        bits += 1
    return bits


@entry
def by_first_bits(heads, numbers, owners, bits):
    """(borders int64 [2^bits + 1], numbers, owners), sorted by the first `bits` bits of their `heads` (uint64 [n])."""
    borders = np.zeros((1 << bits) + 1, np.int64)
    shift = np.uint64(64 - bits)
    for head in heads:
        borders[np.int64(head >> shift) + 1] += 1
    for part in range(1 << bits):
        borders[part + 1] += borders[part]
    following = borders[:-1].copy()
    some, theirs = np.empty_like(numbers), np.empty_like(owners)
    for place in range(len(heads)):
        part = np.int64(heads[place] >> shift)
        some[following[part]] = numbers[place]
        theirs[following[part]] = owners[place]
        following[part] += 1
    return borders, some, theirs
