"""Kernels that look for whole items in texts: short runs of equal words are seeds, from which item and text are aligned."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry
from hone.text.contamination.match import _key, _longest, _mixed, _power
from hone.text.units import next_word, unit_table

_BASE = np.uint64(0x9FB21C651E98DF25)
_SHIFT = np.uint64(32)
MAX_SKIP = 6
"""Most words of the text, and of the item, that are skipped at one place: letters of choices, words such as 'answer'."""
ANY, NEARLY, EXACT = range(3)
"""How a unit of an item is matched: a long run or most of its words; all words but one; all words in a row."""
MIN_DISTINCT = 5
"""Least different words with a letter in what is matched, so that runs of numbers or of one word are no match."""


@entry
def grown(found: np.ndarray) -> np.ndarray:
    """A copy of `found` [k, n] with room for 2n columns."""
    wider = np.empty((found.shape[0], 2 * found.shape[1]), found.dtype)
    wider[:, : found.shape[1]] = found
    return wider


@entry
def _enumerates(data: np.ndarray, start: int, end: int) -> bool:
    """Whether a word is one of the letters a to j alone, which stand before choices."""
    return end - start == 1 and 97 <= data[start] | 32 <= 106


def item_table() -> np.ndarray:
    """`unit_table()` in which underscores separate words, as blanks that are to be filled in."""
    table = unit_table().copy()
    table[ord("_")] = 0
    return table


@entry
def _words_of(data: np.ndarray, hashes: np.ndarray, start: np.ndarray, end: np.ndarray, table: np.ndarray) -> int:
    """Writes the hash and the position of every word of one text; returns the number of words. `table` is `item_table()`.

    Names of LaTeX's commands (after a backslash) and single letters up to j are no words.
    """
    count, place = 0, 0
    while True:
        begin, stop, place, value = next_word(data, place, len(data), table)
        if begin == len(data):
            return count
        if (begin > 0 and data[begin - 1] == 92) or _enumerates(data, begin, stop):
            continue
        start[count], end[count], hashes[count] = begin, stop, _mixed(value)
        count += 1


@entry
def words_of(
    data: np.ndarray, offsets: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(hash of every word, whether it has a letter, first word of each text [n + 1]); words as in an alignment.

    `table` is `item_table()`.
    """
    room = _longest(offsets) + 1
    hashes, start, end = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    most = offsets[-1] - offsets[0] + 1
    words, letters, first = np.empty(most, np.uint64), np.empty(most, np.bool_), np.zeros(len(offsets), np.int64)
    total = 0
    for number in range(len(offsets) - 1):
        base = offsets[number]
        count = _words_of(data[base : offsets[number + 1]], hashes, start, end, table)
        for place in range(count):
            words[total] = hashes[place]
            letters[total] = False
            for at in range(base + start[place], base + end[place]):
                letters[total] |= data[at] >= 65
            total += 1
        first[number + 1] = total
    return words[:total].copy(), letters[:total].copy(), first


@entry
def seeds_of(words: np.ndarray, first: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(key, unit, word) of every run of `sizes[unit]` (int64 [units]) words of each unit; `word` is its place in the unit."""
    key, unit, word = np.empty(len(words), np.uint64), np.empty(len(words), np.int64), np.empty(len(words), np.int64)
    total = 0
    for number in range(len(first) - 1):
        size = sizes[number]
        power, value = _power(size), np.uint64(0)
        for place in range(first[number + 1] - first[number]):
            value = value * _BASE + words[first[number] + place]
            if place >= size:
                value -= words[first[number] + place - size] * power
            if place >= size - 1:
                key[total], unit[total], word[total] = _key(value, size), number, place - size + 1
                total += 1
    return key[:total].copy(), unit[:total].copy(), word[:total].copy()


@entry
def _resync(one: np.ndarray, i: int, other: np.ndarray, j: int, step: int) -> tuple[int, int]:
    """How many words of `one` and of `other` to skip until two words are equal again (one, at an end); (-1, -1) if too many."""
    for skipped in range(1, 2 * MAX_SKIP + 1):
        for more in range(max(0, skipped - MAX_SKIP), min(skipped, MAX_SKIP) + 1):
            a, b = i + step * more, j + step * (skipped - more)
            if a < 0 or a >= len(one) or b < 0 or b >= len(other) or one[a] != other[b]:
                continue
            after, beyond = a + step, b + step
            at_end = after < 0 or after >= len(one)
            if at_end or (0 <= beyond < len(other) and one[after] == other[beyond]):
                return more, skipped - more
    return -1, -1


@entry
def _extend(
    item: np.ndarray, i: int, text: np.ndarray, j: int, step: int, allowed: int, matched: np.ndarray
) -> tuple[int, int, int]:
    """(words of the first run, the text's last word that is matched, words of the item that are not) from item[i] and text[j]
    on, in direction `step`; `matched` is set for words of the item. More than `allowed` misses end it."""
    run, misses, last, broken = 0, 0, j - step, False
    while 0 <= i < len(item):
        if 0 <= j < len(text) and item[i] == text[j]:
            matched[i] = True
            last = j
            run += not broken
            i += step
            j += step
            continue
        broken = True
        more, skipped = _resync(item, i, text, j, step)
        if more < 0 or misses + more > allowed:
            break
        misses += more
        i += step * more
        j += step * skipped
    while 0 <= i < len(item):
        misses += 1
        i += step
    return run, last, misses


@entry
def _content(item: np.ndarray, letters: np.ndarray, chosen: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """(words with a letter, different ones up to MIN_DISTINCT) among the chosen ones of item[low:high]."""
    count, different = 0, 0
    seen = np.zeros(MIN_DISTINCT, np.uint64)
    for place in range(low, high):
        if not chosen[place] or not letters[place]:
            continue
        count += 1
        new = different < MIN_DISTINCT
        for index in range(different):
            new = new and seen[index] != item[place]
        if new:
            seen[different] = item[place]
            different += 1
    return count, different


@entry
def aligned(
    item: np.ndarray, letters: np.ndarray, i: int, text: np.ndarray, j: int, size: int, how: int, words: int,
    coverage: float, matched: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """(first, last word of the text) of a match of `item` around the equal words item[i:i + size] and text[j:j + size]; (-1, -1)
    for none. `matched` bool, at least as long as the item, is scratch."""
    total = len(item)
    matched[:total] = False
    matched[i : i + size] = True
    allowed = total - np.int64(np.ceil(coverage * total)) if how == ANY else (1 if how == NEARLY else 0)
    right, last, missed = _extend(item, i + size, text, j + size, 1, allowed, matched)
    left, first, missing = _extend(item, i - 1, text, j - 1, -1, allowed, matched)
    run = left + size + right
    if how == ANY and run >= words:
        count, different = _content(item, letters, matched, i - left, i + size + right)
        if 2 * count >= words and different >= MIN_DISTINCT:
            return first, last
    if missed + missing > allowed or (how == EXACT and run < total):
        return -1, -1
    count, different = _content(item, letters, matched, 0, total)
    if different < MIN_DISTINCT or 3 * count < total:
        return -1, -1
    return first, last


@entry
def matches_of(
    data: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, table: np.ndarray, bits: np.ndarray, keys: np.ndarray,
    begins: np.ndarray, unit: np.ndarray, place: np.ndarray, items: np.ndarray, letters: np.ndarray, first: np.ndarray,
    how: np.ndarray, words: int, coverage: float, points: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(text, start, end, unit) of every match, int64 [k]; start and end are byte offsets in the text.

    Seed k of `keys` (sorted) begins at words place[begins[k]:begins[k + 1]] of units unit[...]; unit u is
    items[first[u]:first[u + 1]], matched as how[u]. `points` is `item_table()`.
    """
    room = _longest(offsets) + 1
    hashes, start, end = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    longest = 1
    for number in range(len(first) - 1):
        longest = max(longest, first[number + 1] - first[number])
    matched = np.zeros(longest, np.bool_)
    done_text, done_word = np.full(len(first), -1, np.int64), np.zeros(len(first), np.int64)
    mask, bit_mask = np.uint64(len(table) - 1), np.uint64(len(bits) * 64 - 1)
    found, total = np.empty((4, 1024), np.int64), 0
    for number in range(len(offsets) - 1):
        count = _words_of(data[offsets[number] : offsets[number + 1]], hashes, start, end, points)
        text = hashes[:count]
        for row in range(len(lengths)):
            size = lengths[row]
            power, value = _power(size), np.uint64(0)
            for word in range(count):
                value = value * _BASE + text[word]
                if word >= size:
                    value -= text[word - size] * power
                if word < size - 1:
                    continue
                key = _key(value, size)
                bit = (key >> _SHIFT) & bit_mask
                if not (bits[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1):
                    continue
                at = key & mask
                while table[at] != np.uint64(0) and table[at] != key:
                    at = (at + np.uint64(1)) & mask
                if table[at] != key:
                    continue
                seed = np.searchsorted(keys, key)
                for posting in range(begins[seed], begins[seed + 1]):
                    which = unit[posting]
                    if done_text[which] == number and word <= done_word[which]:
                        continue
                    low, high = first[which], first[which + 1]
                    one, other = aligned(
                        items[low:high], letters[low:high], place[posting], text, word - size + 1, size, how[which],
                        words, coverage, matched,
                    )  # fmt: skip
                    if one < 0:
                        continue
                    done_text[which], done_word[which] = number, other
                    if total == found.shape[1]:
                        found = grown(found)
                    found[0, total], found[1, total], found[2, total], found[3, total] = (
                        number,
                        start[one],
                        end[other],
                        which,
                    )
                    total += 1
    return found[0, :total].copy(), found[1, :total].copy(), found[2, :total].copy(), found[3, :total].copy()
