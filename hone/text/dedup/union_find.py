"""Union-find over document indices, and what it joins: edges, equal numbers, fingerprints that differ in few bits."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, kernel

_AHEAD = 64
"""Edges read together before they are joined, so that their memory reads overlap."""


def kind_of(count: int) -> type:
    """The dtype for indices of `count` nodes: int32 where they fit, else int64."""
    return np.int32 if count < 1 << 31 else np.int64


def singles(count: int) -> np.ndarray:
    """Parents of `count` nodes without edges."""
    return np.arange(count, dtype=kind_of(count))


@entry
def link(parents, one, other):
    """Joins the sets of two nodes (Rem's algorithm, which climbs from both at once). A parent's index is never above its child's."""
    up, across = parents[one], parents[other]
    while up != across:
        if up < across:
            one, other = other, one
            up, across = across, up
        parents[one] = across
        if one == up:
            break
        one = up
        up = parents[one]


@entry
def join(parents, ones, others):
    """Joins the sets of ones[i] and others[i] (int [num_edges] each) for all i, in `parents`."""
    seen = np.int64(0)
    for begin in range(0, len(ones), _AHEAD):
        end = min(begin + _AHEAD, len(ones))
        for i in range(begin, end):
            seen += parents[ones[i]] ^ parents[others[i]]
        for i in range(begin, end):
            link(parents, np.int64(ones[i]), np.int64(others[i]))
    return seen  # so that the reads ahead are not optimized away


@entry
def flatten(parents):
    """Replaces every parent by its set's lowest index. Parents come before their children, so one pass is enough."""
    for node in range(len(parents)):
        parents[node] = parents[parents[node]]


@entry
def least_members(roots, letters):
    """Replaces each node's index in `roots` by that of the set's member whose row of `letters` ([n, width], unsigned) is lowest.

    `roots` (int [n]) has equal indices below n for members of a set. Of equal rows, the lower index is taken.
    """
    best = np.full_like(roots, -1)
    for node in range(len(roots)):
        rival = best[roots[node]]
        if rival < 0:
            best[roots[node]] = node
            continue
        for place in range(letters.shape[1]):
            if letters[node, place] != letters[rival, place]:
                if letters[node, place] < letters[rival, place]:
                    best[roots[node]] = node
                break
    for node in range(len(roots)):
        roots[node] = best[roots[node]]


def lowest_ids(groups: np.ndarray, ids: np.ndarray, rank: np.ndarray | None = None) -> np.ndarray:
    """For each document (int [n]) the document of its group with the lowest (rank, id); overwrites `groups` with the result.

    `groups` (int [n], each 0 <= group < n) is equal for documents of one group; `ids` [n] are strings or numbers, ordered
    as Python orders them; `rank` (uint64 [n]), without which ids alone decide. Of equal ones in a group, the lower index is taken.
    """
    letters = _letters(ids)
    if rank is not None:
        high = rank.astype(">u8").view(np.uint8).reshape(len(rank), 8)
        letters = np.hstack([high.astype(letters.dtype), letters])
    least_members(groups, letters)
    return groups


def _letters(ids: np.ndarray) -> np.ndarray:
    """`ids` as unsigned numbers [n, width], whose rows compare lexicographically like the ids."""
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    ids = np.ascontiguousarray(ids)
    if ids.dtype.kind in "US":
        letter = np.uint32 if ids.dtype.kind == "U" else np.uint8
        return ids.view(letter).reshape(len(ids), -1 if len(ids) else 1)
    assert ids.dtype.kind == "u", f"ids must be strings or unsigned numbers, not {ids.dtype}"
    return ids.reshape(-1, 1)


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


@entry
def gather_bits(fingerprints, bits):
    """Keys (uint64 [n]) made of the chosen `bits` (int64 [k]) of each of the `fingerprints` (uint64 [n])."""
    keys = np.zeros(len(fingerprints), np.uint64)
    for i in range(len(fingerprints)):
        for bit in bits:
            keys[i] = keys[i] << np.uint64(1) | (fingerprints[i] >> np.uint64(bit)) & np.uint64(1)
    return keys


@entry
def join_near(parents, indices, fingerprints, keys, distance):
    """Joins `indices` in `parents` where the `keys` (sorted) are equal and the fingerprints differ in at most `distance` bits."""
    begin = 0
    for end in range(1, len(keys) + 1):
        if end < len(keys) and keys[end] == keys[begin]:
            continue
        for i in range(begin, end):
            for j in range(i + 1, end):
                differing = fingerprints[i] ^ fingerprints[j]
                for _ in range(distance):
                    differing &= differing - np.uint64(1)
                if differing == 0:
                    link(parents, indices[i], indices[j])
        begin = end
