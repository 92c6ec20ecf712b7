"""Kernels over the bits of fingerprints: keys of hash tables, and pairs that differ in few bits."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry
from hone.text.dedup.union_find import link


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
