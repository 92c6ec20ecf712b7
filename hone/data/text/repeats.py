"""Kernels for what a document repeats: lines, paragraphs, word n-grams (exact), and how soon its words do (MTLD)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hone.data.text.segment import find, inlined, kernel

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0)
FACTOR_PERCENT = 72
"""A factor of MTLD ends when its types are at most this share of its words."""


class Table(NamedTuple):
    """Room for one hash table and the n-grams at each place; the largest document fits."""

    keys: np.ndarray
    counts: np.ndarray
    grams: np.ndarray
    chosen: np.ndarray


@kernel
def capacity_for(num_keys: int) -> int:
    """A power of two that holds `num_keys` at half load."""
    size = 16
    while size < 2 * num_keys:
        size *= 2
    return size


@njit(cache=True, nogil=True, boundscheck=False)
def empty_table(num_bytes: int) -> Table:
    """Room for documents of up to `num_bytes`; pages are only touched as far as a document needs them."""
    most = num_bytes // 2 + 2
    slots = capacity_for(most)
    return Table(
        np.empty(slots, np.uint64), np.empty(slots, np.int32), np.empty(most + 1, np.int32), np.empty(most, np.int32)
    )


@kernel
def duplicates(hashes: np.ndarray, chars: np.ndarray, num_parts: int, table: Table) -> tuple[int, int]:
    """(parts seen before, characters in them) of `num_parts` parts with `hashes`."""
    if num_parts < 2:
        return 0, 0
    keys = table.keys[: capacity_for(num_parts)]
    keys[:] = _EMPTY
    count, repeated = 0, 0
    for index in range(num_parts):
        key = hashes[index] | np.uint64(1) << np.uint64(63)
        slot = find(keys, key)
        if keys[slot] == key:
            count += 1
            repeated += chars[index]
        keys[slot] = key
    return count, repeated


@inlined
def _slot_of(keys: np.ndarray, key: int, shift: int) -> int:
    """The slot of a key made of two numbers: they are spread first, so that neighbours do not crowd."""
    mask = np.uint64(len(keys) - 1)
    slot = key * _SPREAD >> shift
    while keys[slot] != key and keys[slot] != _EMPTY:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def ngrams(ids: np.ndarray, places: np.ndarray, num_words: int, table: Table, out: np.ndarray) -> None:
    """Characters of repeated n-grams into `out` (int64 [9]): for n = 2, 3, 4 those of the most frequent n-gram, all its
    occurrences together; for 5 to 10 those in the union of the n-grams seen before.

    An n-gram is the pair of the (n-1)-grams that begin at its first and its second word, both known by number, so equal
    keys are equal n-grams; where either of them is unique the n-gram is too, and its place is left out from then on.
    """
    out[:] = 0
    grams, chosen = table.grams, table.chosen
    for index in range(num_words):
        grams[index] = ids[index]
        chosen[index] = index
    grams[num_words] = -1
    num_chosen = num_words
    for n in range(2, 11):
        if num_chosen < 2:
            return
        slots = capacity_for(num_chosen)
        keys, counts = table.keys[:slots], table.counts[:slots]
        keys[:] = _EMPTY
        shift = np.uint64(64)
        while slots > 1:
            slots >>= 1
            shift -= np.uint64(1)
        repeated, first, end = 0, 0, 0
        for index in range(num_chosen):
            place = chosen[index]
            after = grams[place + 1]
            if after < 0:
                grams[place] = -1
                continue
            key = np.uint64(grams[place] + 1) << np.uint64(32) | np.uint64(after)
            slot = _slot_of(keys, key, shift)
            grams[place] = np.int32(slot)
            if keys[slot] == _EMPTY:
                keys[slot] = key
                counts[slot] = 1
                continue
            counts[slot] += 1
            if n > 4:
                if place > end:
                    repeated += places[end] - places[first] - (end > first)
                    first = place
                end = place + n
        if n > 4:
            out[n - 2] = repeated + places[end] - places[first] - (end > first)
        left, best, best_chars = 0, 1, 0
        for index in range(num_chosen):
            place = chosen[index]
            slot = grams[place]
            if slot < 0:
                continue
            times = counts[slot]
            if times < 2:
                grams[place] = -1
                continue
            chosen[left] = place
            left += 1
            if n < 5 and times >= best:
                chars = places[place + n] - places[place] - 1
                best_chars = max(chars, best_chars) if times == best else chars
                best = times
        if n < 5:
            out[n - 2] = best * best_chars
        num_chosen = left


@kernel
def _factors(forms: np.ndarray, num_words: int, step: int, stamps: np.ndarray, stamp: int) -> tuple[float, int]:
    """(factors of one direction, the last stamp used). Each factor has a stamp of its own: no clearing in between."""
    factors, kinds, tokens = 0, 0, 0
    place = 0 if step > 0 else num_words - 1
    for _ in range(num_words):
        form = forms[place]
        place += step
        tokens += 1
        if stamps[form] != stamp:
            stamps[form] = stamp
            kinds += 1
        if 100 * kinds <= FACTOR_PERCENT * tokens:
            factors += 1
            stamp += 1
            kinds, tokens = 0, 0
    part = (1 - kinds / tokens) / (1 - FACTOR_PERCENT / 100) if tokens else 0.0
    return factors + part, stamp + 1


@kernel
def diversity(forms: np.ndarray, num_words: int, stamps: np.ndarray, stamp: int) -> tuple[int, float, int]:
    """(different forms, MTLD, next free stamp) of the words with numbers `forms`. McCarthy and Jarvis 2010.

    MTLD is the mean length of the stretches ("factors") over which the share of different words sinks to 0.72, counted
    once forwards and once backwards; a text that never sinks so far has its own length.
    """
    if num_words == 0:
        return 0, 0.0, stamp
    different = 0
    for index in range(num_words):
        if stamps[forms[index]] != stamp:
            stamps[forms[index]] = stamp
            different += 1
    forwards, stamp = _factors(forms, num_words, 1, stamps, stamp + 1)
    backwards, stamp = _factors(forms, num_words, -1, stamps, stamp)
    one = num_words / forwards if forwards > 0 else float(num_words)
    other = num_words / backwards if backwards > 0 else float(num_words)
    return different, (one + other) / 2, stamp
