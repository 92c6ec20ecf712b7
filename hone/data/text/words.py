"""Kernels for single words: what a rule may want to know of one, counted once for every different word."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hone.data.text import tables
from hone.data.text.hashing import mix
from hone.data.text.segment import code_point, fold, inlined, kernel

(
    CHARS, HASHES, ELLIPSES, LETTERED, SENTENCES, DIGITS, UPPERS, ALNUMS, PARENS, BRACES, URLS, URL_CHARS, NUMBERS,
    SYLLABLES, CAPITALS, ATS,
) = range(16)  # fmt: skip
"""Counts of a word; UPPERS are A to Z, CAPITALS all of Unicode."""
NUM_COUNTS = 16
_C4_MARKS = np.array([ord(char) for char in ".?!\"'"], np.int32)
_HTTP, _HTTPS, _WWW = (np.array([ord(char) for char in text], np.int32) for text in ("http://", "https://", "www."))
_EDIT = np.array([ord(char) for char in "[edit"], np.int32)
_SILENT_AFTER_NOT = np.array([ord(char) for char in "aeiouyl"], np.int32)
_QUANTITY = np.array([ord(char) for char in "0123456789.,"], np.int32)
_BULLET, _ELLIPSIS, _END, _C4_END = (tables.flag(name) for name in ("bullet", "ellipsis", "terminal", "c4_terminal"))
_QUANTITY_FLAG, _LETTER = tables.flag("quantity"), tables.flag("letter")
_FILLED, _TOXIC, _WIDE = tables.flag("filled"), tables.flag("toxic_first"), tables.flag("wide")
_DOT, _ELLIPSIS_MARK, _HASH, _OPEN, _CLOSE, _BRACE, _AT = (ord(char) for char in ".…#(){@")


KEY, FLAGS, SMALL_COUNTS, BARE_HASH, FORM, WIDE_ROW = 0, 1, 2, 4, 5, 6
"""Places in a word's record of eight uint64; SMALL_COUNTS are 16 bytes."""
MOST_SMALL = 255
_NUMBER_BITS, _NUMBER = np.uint64(28), np.uint64((1 << 28) - 1)


class Words(NamedTuple):
    """Every different word seen so far, by open addressing.

    `slots` uint64 [power of two] holds, where not 0, the number of a word + 1 (lowest 28 bits) and the top of its hash.
    Frequent words come first and so have low numbers: what is looked at most lies together. `records` uint64 [words, 8],
    one cache line each: hash of the raw word, bits of tables.FLAGS, counts as bytes, hash and number of the bare form.
    `small` is the same memory as uint8 [words, 64]. Counts above 255 stand in `wide` int32 [rows, NUM_COUNTS].
    `bare_slots` is the table of bare forms, like `slots`; `used` int64 [3]: words, bare forms, wide rows.
    """

    slots: np.ndarray
    records: np.ndarray
    small: np.ndarray
    wide: np.ndarray
    bare_slots: np.ndarray
    used: np.ndarray


class Alphabet(NamedTuple):
    """What bytes and code points are and which patterns to look for: the tables of hone.data.text.tables."""

    kinds: np.ndarray
    spaces: np.ndarray
    classes: np.ndarray
    lower: np.ndarray
    codes: np.ndarray
    offsets: np.ndarray
    modes: np.ndarray
    bits: np.ndarray
    letters: np.ndarray


@njit(cache=True, nogil=True, boundscheck=False)
def empty_words(capacity: int, num_bytes: int) -> Words:
    """A table with room for `capacity` (a power of two) words, among them the long ones of a text of `num_bytes`."""
    slots = 2 * capacity
    records = np.zeros((capacity, 8), np.uint64)
    return Words(
        np.zeros(slots, np.uint64),
        records,
        records.view(np.uint8),
        np.zeros((num_bytes // MOST_SMALL + 16, NUM_COUNTS), np.int32),
        np.zeros(slots, np.uint64),
        np.zeros(3, np.int64),
    )


@inlined
def is_full(words: Words) -> bool:
    """Whether the next new word would overfill one of the tables."""
    return words.used[0] == len(words.records) or words.used[2] == len(words.wide)


@inlined
def look_up(slots: np.ndarray, records: np.ndarray, key: int) -> tuple[int, int]:
    """(slot, number) of the word with hash `key`; (the empty slot where it belongs, -1) when it is new."""
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot] != np.uint64(0):
        entry = slots[slot]
        if (entry ^ key) >> _NUMBER_BITS == np.uint64(0):
            number = np.int64(entry & _NUMBER) - 1
            if records[number, KEY] == key:
                return np.int64(slot), number
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot), np.int64(-1)


@inlined
def _form_of(slots: np.ndarray, key: int) -> tuple[int, int]:
    """As `look_up` for bare forms, which are told apart by the top of their hash and their place."""
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot] != np.uint64(0):
        entry = slots[slot]
        if (entry ^ key) >> _NUMBER_BITS == np.uint64(0):
            return np.int64(slot), np.int64(entry & _NUMBER) - 1
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot), np.int64(-1)


@inlined
def class_of(code: int, classes: np.ndarray) -> int:
    """The bits of `code` in the table of classes."""
    return np.int64(classes[code]) if code < len(classes) else 0


@inlined
def among(code: int, choices: np.ndarray) -> bool:
    """Whether `code` is one of `choices`."""
    for choice in choices:  # noqa: SIM110
        if code == choice:
            return True
    return False


@inlined
def stands_at(pattern: np.ndarray, codes: np.ndarray, place: int, end: int) -> bool:
    """Whether codes[place:end] begins with `pattern`."""
    if place < 0 or place + len(pattern) > end:
        return False
    for index in range(len(pattern)):  # noqa: SIM110
        if codes[place + index] != pattern[index]:
            return False
    return True


@inlined
def bare_span(lower: np.ndarray, num_chars: int, classes: np.ndarray) -> tuple[int, int]:
    """(first, end) of a word without the punctuation around."""
    first, end = 0, num_chars
    while first < end and class_of(lower[first], classes) & tables.EDGE:
        first += 1
    while end > first and class_of(lower[end - 1], classes) & tables.EDGE:
        end -= 1
    return first, end


@inlined
def syllables(lower: np.ndarray, first: int, end: int) -> int:
    """Groups of vowels (a e i o u y) of an English word; a last e is silent unless it makes the only group or ends -le."""
    groups, before = 0, False
    for index in range(first, end):
        code = lower[index]
        vowel = code == 97 or code == 101 or code == 105 or code == 111 or code == 117 or code == 121
        groups += vowel and not before
        before = vowel
    if groups > 1 and lower[end - 1] == 101 and not among(lower[end - 2], _SILENT_AFTER_NOT):
        groups -= 1
    return max(groups, 1)


@kernel
def c4_end(lower: np.ndarray, end: int) -> bool:
    """Whether a line whose last word this is ends as C4 wants, citation marks such as [3] taken away."""
    while end > 0 and lower[end - 1] == 93:
        first = end - 2
        while first >= 0 and 48 <= lower[first] <= 57:
            first -= 1
        if first >= 0 and lower[first] == 91:
            end = first
        elif stands_at(_EDIT, lower, end - 1 - len(_EDIT), end):
            end -= 1 + len(_EDIT)
        else:
            break
    if end == 0 or not among(lower[end - 1], _C4_MARKS):
        return False
    return not (end >= 3 and lower[end - 1] == _DOT and lower[end - 2] == _DOT and lower[end - 3] == _DOT)


@inlined
def end_flags(lower: np.ndarray, num_chars: int, classes: np.ndarray) -> tuple[int, int]:
    """(flags of how the word ends, 1 when a sentence ends with it)."""
    last = lower[num_chars - 1]
    bits = 0
    dots = num_chars >= 3 and last == _DOT and lower[num_chars - 2] == _DOT and lower[num_chars - 3] == _DOT
    if dots or last == _ELLIPSIS_MARK:
        bits |= _ELLIPSIS
    if class_of(last, classes) & tables.TERMINAL:
        bits |= _END
    if c4_end(lower, num_chars):
        bits |= _C4_END
    end = num_chars
    while end > 0 and class_of(lower[end - 1], classes) & tables.CLOSER:
        end -= 1
    ends = end > 0 and (lower[end - 1] == 46 or lower[end - 1] == 33 or lower[end - 1] == 63)
    return bits, np.int64(ends)


@inlined
def pattern_flags(lower: np.ndarray, num_chars: int, first: int, end: int, alphabet: Alphabet) -> int:
    """The bits of the patterns that the word fits."""
    bits, letters = 0, np.uint64(0)
    for place in range(num_chars):
        letters |= np.uint64(1) << np.uint64(lower[place] & 63)
    for index in range(len(alphabet.modes)):
        if alphabet.letters[index] & ~letters:
            continue
        pattern = alphabet.codes[alphabet.offsets[index] : alphabet.offsets[index + 1]]
        size, mode = len(pattern), alphabet.modes[index]
        if mode == tables.STARTS:
            fits = stands_at(pattern, lower, 0, num_chars)
        elif mode == tables.ENDS:
            fits = stands_at(pattern, lower, num_chars - size, num_chars)
        elif mode == tables.EQUALS:
            fits = size == num_chars and stands_at(pattern, lower, 0, num_chars)
        elif mode == tables.BARE:
            fits = size == end - first and stands_at(pattern, lower, first, end)
        else:
            fits = False
            for place in range(num_chars - size + 1):
                if stands_at(pattern, lower, place, num_chars):
                    fits = True
                    break
        if fits:
            bits |= alphabet.bits[index]
    return bits


@inlined
def is_quantity(lower: np.ndarray, num_chars: int, classes: np.ndarray) -> bool:
    """Whether the word is a number as counters write it: 3, 1,204, 2.5k, (17."""
    place = 0
    while place < num_chars and not (lower[place] == 95 or class_of(lower[place], classes) & tables.ALPHANUMERIC):
        place += 1
    if place == num_chars or not 48 <= lower[place] <= 57:
        return False
    while place < num_chars and among(lower[place], _QUANTITY):
        place += 1
    if place < num_chars and (lower[place] == 107 or lower[place] == 109 or lower[place] == 98):
        place += 1
    return place == num_chars


@inlined
def char_counts(
    data: np.ndarray, start: int, end: int, alphabet: Alphabet, lower: np.ndarray, row: np.ndarray
) -> tuple[int, int]:
    """Fills `row` with the counts of characters and `lower` with the word in lower case. Returns (characters, flags)."""
    row[:] = 0
    num_chars, dots, place = 0, 0, start
    while place < end:
        code, width = code_point(data, place)
        place += width
        kind = class_of(code, alphabet.classes)
        row[LETTERED] |= (kind & tables.ALPHABETIC) != 0
        row[ALNUMS] += (kind & tables.ALPHANUMERIC) != 0
        row[CAPITALS] += (kind & tables.UPPER_CASE) != 0
        row[DIGITS] += 48 <= code <= 57
        row[UPPERS] += 65 <= code <= 90
        row[HASHES] += code == _HASH
        row[PARENS] += code in (_OPEN, _CLOSE)
        row[BRACES] += code == _BRACE
        row[ATS] += code == _AT
        row[SENTENCES] += (kind & tables.FULL_STOP) != 0
        dots = dots + 1 if code == _DOT else 0
        row[ELLIPSES] += code == _ELLIPSIS_MARK or (dots > 0 and dots % 3 == 0)
        lower[num_chars] = alphabet.lower[code] if code < len(alphabet.lower) else code
        num_chars += 1
    row[CHARS] = num_chars
    row[NUMBERS] = row[DIGITS] > 0 and row[LETTERED] == 0
    return num_chars, _LETTER if row[LETTERED] else 0


@kernel
def add_word(
    data: np.ndarray, start: int, end: int, slot: int, key: int, words: Words, alphabet: Alphabet, toxic: np.ndarray,
    lower: np.ndarray,
) -> int:  # fmt: skip
    """Puts the word data[start:end] with hash `key` into the empty `slot`; returns its number. `lower` is scratch."""
    number = words.used[0]
    words.used[0] += 1
    words.slots[slot] = key & ~_NUMBER | np.uint64(number + 1)
    record = words.records[number]
    record[KEY] = key
    row = words.wide[words.used[2]]
    num_chars, bits = char_counts(data, start, end, alphabet, lower, row)
    first, bare_end = bare_span(lower, num_chars, alphabet.classes)
    at_end, ends_sentence = end_flags(lower, num_chars, alphabet.classes)
    row[SENTENCES] += ends_sentence
    bits |= at_end | pattern_flags(lower, num_chars, first, bare_end, alphabet)
    if class_of(lower[0], alphabet.classes) & tables.BULLET:
        bits |= _BULLET
    if is_quantity(lower, num_chars, alphabet.classes):
        bits |= _QUANTITY_FLAG
    if row[LETTERED]:
        row[SYLLABLES] = syllables(lower, first, bare_end) if bare_end > first else 1
    for place in range(num_chars):
        if lower[place] == 104 or lower[place] == 119:
            row[URLS] += stands_at(_HTTP, lower, place, num_chars) or stands_at(_HTTPS, lower, place, num_chars)
            row[URLS] += stands_at(_WWW, lower, place, num_chars)
    row[URL_CHARS] = num_chars if row[URLS] else 0
    hashed = np.uint64(1)
    for place in range(first, bare_end):
        hashed = mix(fold(hashed, np.uint64(lower[place])))
    record[BARE_HASH] = hashed
    if bare_end > first:
        bits |= _FILLED
    spot, form = _form_of(words.bare_slots, hashed)
    if form < 0:
        form = words.used[1]
        words.used[1] += 1
        words.bare_slots[spot] = hashed & ~_NUMBER | np.uint64(form + 1)
    record[FORM] = np.uint64(form)
    if len(toxic) and toxic[min(np.searchsorted(toxic, hashed), len(toxic) - 1)] == hashed:
        bits |= _TOXIC
    if num_chars > MOST_SMALL:
        bits |= _WIDE
        record[WIDE_ROW] = words.used[2]
        words.used[2] += 1
    else:
        for index in range(NUM_COUNTS):
            words.small[number, 8 * SMALL_COUNTS + index] = row[index]
    record[FLAGS] = np.uint64(bits)
    return number
