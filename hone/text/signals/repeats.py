"""Kernels for repeats in a document: lines, paragraphs, word n-grams (exact), and lexical diversity (MTLD)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hone.text.compiled import allocating, inlined, kernel
from hone.text.segment import find

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0)
_LATEST = (1 << 31) - 1
"""The largest word number in int32 clocks, after which they restart."""
FACTOR_PERCENT = 72
"""A factor of MTLD ends when the distinct share of its words is at most this many percent."""


class Table(NamedTuple):
    """Buffers for one hash table and the n-grams at each place, for the largest document.

    `last` int32 is, for each slot of word pairs, when it was last used, counted in words of all documents (`clock` int64 [1] is
    the number of the next word), so that it need not be cleared. `marks` uint8: the place before the first receives unused writes.
    """

    keys: np.ndarray
    counts: np.ndarray
    grams: np.ndarray
    chosen: np.ndarray
    last: np.ndarray
    clock: np.ndarray
    marks: np.ndarray


@kernel
def capacity_for(num_keys: int) -> int:
    """The least power of two that holds `num_keys` at half load."""
    size = 16
    while size < 2 * num_keys:
        size *= 2
    return size


@allocating
def empty_table(num_bytes: int) -> Table:
    """Buffers for documents of up to `num_bytes`; memory pages are only used as far as a document needs them."""
    most = num_bytes // 2 + 2
    slots = capacity_for(most)
    return Table(
        np.empty(slots, np.uint64),
        np.empty(slots, np.int32),
        np.empty(most + 1, np.int32),
        np.empty(most, np.int32),
        np.zeros(2 * slots, np.int32),
        np.ones(1, np.int64),
        np.empty(most + 1, np.uint8),
    )


@kernel
def duplicates(hashes: np.ndarray, chars: np.ndarray, num_parts: int, table: Table) -> tuple[int, int]:
    """(parts that occurred before, characters in them) of `num_parts` parts with `hashes`."""
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
    """The slot of a key made of two numbers, hashed so that neighbouring keys are spread."""
    mask = np.uint64(len(keys) - 1)
    slot = key * _SPREAD >> shift
    while keys[slot] != key and keys[slot] != _EMPTY:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _shift_for(slots: int) -> int:
    """The right shift that reduces a 64-bit product to below `slots`, a power of two."""
    shift = np.uint64(64)
    while slots > 1:
        slots >>= 1
        shift -= np.uint64(1)
    return shift


@kernel
def _perhaps_repeated(ids: np.ndarray, num_words: int, table: Table) -> int:
    """Writes into `table.chosen` the places of all word pairs that occur again, and of some others; returns their number.

    Every pair has a slot; one that finds another there marks both. The caller compares them exactly.
    """
    clock = table.clock[0]
    if clock > _LATEST - num_words:
        table.last[:] = 0
        clock = 1
    table.clock[0] = clock + num_words
    slots = capacity_for(2 * num_words)
    shift, last, marks, chosen = _shift_for(slots), table.last, table.marks, table.chosen
    for index in range(num_words - 1):
        key = np.uint64(ids[index]) << np.uint64(32) | np.uint64(ids[index + 1])
        slot = key * _SPREAD >> shift
        other = last[slot] - clock
        last[slot] = clock + index
        marks[index + 1] = other >= 0
        marks[max(other, -1) + 1] = 1  # without another: the place that is never read
    left = 0
    for index in range(num_words - 1):
        chosen[left] = index
        left += marks[index + 1]
    return left


@inlined
def _chars_from(places: np.ndarray, first: int, end: int) -> int:
    """Characters of words first..end, with the spaces between them; `places` as in scan.Scratch."""
    return (places[end] >> 1) - (places[first] >> 1) - 1 + (places[end] & 1) if end > first else 0


@kernel
def ngrams(ids: np.ndarray, places: np.ndarray, num_words: int, table: Table, out: np.ndarray) -> None:
    """Characters of repeated n-grams into `out` (int64 [9]): for n = 2, 3, 4 those of the most frequent n-gram, all its
    occurrences together; for 5 to 10 those in the union of the n-grams that occurred before.

    An n-gram is the pair of the (n-1)-grams that begin at its first and its second word, both by number, so equal
    keys are equal n-grams; where either of them is unique the n-gram is too, and its place is left out from then on.
    """
    out[:] = 0
    if num_words < 2:
        return
    grams, chosen = table.grams, table.chosen
    num_chosen = _perhaps_repeated(ids, num_words, table)
    grams[: num_words + 1] = -1
    for n in range(2, 11):
        if num_chosen < 2:
            return
        slots = capacity_for(num_chosen)
        keys, counts = table.keys[:slots], table.counts[:slots]
        keys[:] = _EMPTY
        shift = _shift_for(slots)
        repeated, first, end = 0, 0, 0
        for index in range(num_chosen):
            place = chosen[index]
            one, after = (ids[place], ids[place + 1]) if n == 2 else (grams[place], grams[place + 1])
            if after < 0:
                grams[place] = -1
                continue
            key = np.uint64(one + 1) << np.uint64(32) | np.uint64(after)
            slot = _slot_of(keys, key, shift)
            grams[place] = np.int32(slot)
            if keys[slot] == _EMPTY:
                keys[slot] = key
                counts[slot] = 1
                continue
            counts[slot] += 1
            if n > 4:
                if place > end:
                    repeated += _chars_from(places, first, end)
                    first = place
                end = place + n
        if n > 4:
            out[n - 2] = repeated + _chars_from(places, first, end)
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
                chars = _chars_from(places, place, place + n)
                best_chars = max(chars, best_chars) if times == best else chars
                best = times
        if n < 5:
            out[n - 2] = best * best_chars
        num_chosen = left


@kernel
def _factors(seen: np.ndarray, num_words: int, forwards: bool) -> float:
    """Factors in one direction: `seen` is where the form of each word occurred last (backwards: occurs next).

    A form is new to a factor when that is outside of it.
    """
    factors, score, first = 0, 0, 0 if forwards else num_words - 1
    for index in range(num_words):
        place = index if forwards else num_words - 1 - index
        new = seen[place] < first if forwards else seen[place] > first
        score += FACTOR_PERCENT - (100 if new else 0)
        if score >= 0:
            factors, score = factors + 1, 0
            first = place + (1 if forwards else -1)
    tokens = num_words - first if forwards else first + 1
    kinds = (FACTOR_PERCENT * tokens - score) // 100
    part = (1 - kinds / tokens) / (1 - FACTOR_PERCENT / 100) if tokens else 0.0
    return factors + part


@kernel
def diversity(
    forms: np.ndarray, num_words: int, last: np.ndarray, clock: int, before: np.ndarray, after: np.ndarray
) -> tuple[int, float]:
    """(distinct forms, MTLD) of the words with numbers `forms`. McCarthy and Jarvis 2010.

    MTLD is the mean length of the stretches ("factors") over which the share of distinct words falls to 0.72, the mean of
    both directions; a text whose share never falls so far has its own length.

    `last` is when each form was last seen, in words of all documents; this document starts at `clock`.
    `before` and `after` are scratch: where each word's form occurred last and occurs next.
    """
    if num_words == 0:
        return 0, 0.0
    different = 0
    following = after[1:]  # a form that does not occur again is written before the first
    for index in range(num_words):
        form = forms[index]
        place = last[form] - clock
        last[form] = clock + index
        before[index] = max(place, -1)
        following[index] = num_words
        after[max(place, -1) + 1] = index
        different += place < 0
    forwards, backwards = _factors(before, num_words, True), _factors(following, num_words, False)
    one = num_words / forwards if forwards > 0 else float(num_words)
    other = num_words / backwards if backwards > 0 else float(num_words)
    return different, (one + other) / 2
