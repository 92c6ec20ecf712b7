"""Kernels for single words: everything that rules use of a word, counted once for every distinct word."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hone.text import tables
from hone.text.compiled import allocating, inlined, kernel
from hone.text.hashing import PRIME, mix
from hone.text.segment import code_point, place_of, zeros_below

(
    CHARS, HASHES, ELLIPSES, LETTERED, SENTENCES, DIGITS, UPPERS, ALNUMS, PARENS, BRACES, URLS, URL_CHARS, NUMBERS,
    SYLLABLES, CAPITALS, ATS,
) = range(16)  # fmt: skip
"""Counts of a word, named in counts.WORD_COUNTS; UPPERS are A to Z, CAPITALS all of Unicode."""
NUM_COUNTS = 16
_C4_MARKS = np.array([ord(char) for char in ".?!\"'"], np.int32)
_HTTP, _HTTPS, _WWW = (np.array([ord(char) for char in text], np.int32) for text in ("http://", "https://", "www."))
_EDIT = np.array([ord(char) for char in "[edit"], np.int32)
_SILENT_AFTER_NOT = np.array([ord(char) for char in "aeiouyl"], np.int32)
_QUANTITY = np.array([ord(char) for char in "0123456789.,"], np.int32)
_BULLET, _ELLIPSIS, _END, _C4_END = (tables.flag(name) for name in ("bullet", "ellipsis", "terminal", "c4_terminal"))
_QUANTITY_FLAG, _LETTER = tables.flag("quantity"), tables.flag("letter")
_FILLED, _TOXIC, _WIDE = tables.flag("filled"), tables.flag("toxic_first"), tables.flag("wide")
_ENDS, _STOP = tables.flag("ends"), tables.flag("stop_any")
_VOWELS = sum(1 << ord(char) - 97 for char in "aeiouy")
_ONE = np.uint64(1)
STOP_BITS = 1 << 10
"""Words of 64 bits in the bitmap of stop words."""
_STOP_MASK = np.uint64(STOP_BITS - 1)
_URL_LETTERS, _WWW_LETTERS = (np.uint64(sum(1 << ord(char) % 64 for char in set(text))) for text in ("http:/", "w."))
_DOT, _ELLIPSIS_MARK, _HASH, _OPEN, _CLOSE, _BRACE, _AT = (ord(char) for char in ".…#(){@")


WORD = np.dtype([(name, np.uint64) for name in ("key", "flags", "low", "high")])
"""A word: hash of the raw word; bits of tables.FLAGS, the number of its bare form above them; its counts as bytes, CHARS to UPPERS and
ALNUMS to ATS."""
FORM = np.dtype([("bare_hash", np.uint64), ("wide_row", np.uint64)])
"""What is rarely used of a word: hash of its bare form, its row of wide counts."""
FORM_SHIFT = len(tables.FLAGS)
MOST_SMALL = 255
_NUMBER_BITS, _NUMBER = np.uint64(28), np.uint64((1 << 28) - 1)
_TAG_BITS = np.uint64(32)


class Words(NamedTuple):
    """Every distinct word so far, by open addressing.

    `slots` uint32 [power of two] holds, if not 0, the number of a word + 1 and above it bits 32 and up of its hash.
    Frequent words come first and so have low numbers, which keeps their records close together. `records` WORD [words] are
    two to a cache line; `others` FORM [words]. Counts above 255 are in `wide` int32
    [rows, NUM_COUNTS]. `bare_slots` uint64 is the table of bare forms: number + 1 (lowest 28 bits) and the top of the
    hash. `used` int64 [3]: words, bare forms, wide rows.
    """

    slots: np.ndarray
    records: np.ndarray
    others: np.ndarray
    wide: np.ndarray
    bare_slots: np.ndarray
    used: np.ndarray


class Alphabet(NamedTuple):
    """The classes of bytes and code points and the patterns to find: the tables of hone.text.tables, what ASCII characters
    add to the counts, `unit_table()`, and the stop words of all languages (`language_tables`)."""

    spaces: np.ndarray
    sums: np.ndarray
    classes: np.ndarray
    lower: np.ndarray
    codes: np.ndarray
    offsets: np.ndarray
    modes: np.ndarray
    bits: np.ndarray
    letters: np.ndarray
    sizes: np.ndarray
    units: np.ndarray
    stops: np.ndarray
    stops_of: np.ndarray
    stop_bits: np.ndarray


@allocating
def empty_words(capacity: int, num_bytes: int) -> Words:
    """An empty table for `capacity` (a power of two) words, among them the long ones of a text of `num_bytes`."""
    slots = 2 * capacity
    return Words(
        np.zeros(slots, np.uint32),
        np.zeros(capacity, WORD),
        np.zeros(capacity, FORM),
        np.zeros((num_bytes // MOST_SMALL + 16, NUM_COUNTS), np.int32),
        np.zeros(slots, np.uint64),
        np.zeros(3, np.int64),
    )


@inlined
def is_full(words: Words) -> bool:
    """Whether the next new word would overfill one of the tables."""
    return words.used[0] == len(words.records) or words.used[2] == len(words.wide)


@inlined
def entry_of(key: int, number: int, mask: int) -> int:
    """The entry of `slots`, of which there are mask + 1, for word `number` with hash `key`."""
    return np.uint32(key >> _TAG_BITS & ~mask & np.uint64(0xFFFFFFFF) | np.uint64(number + 1))


@inlined
def look_up(slots: np.ndarray, records: np.ndarray, key: int) -> tuple[int, int]:
    """(slot, number) of the word with hash `key`; (the empty slot for it, -1) when it is new."""
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot] != np.uint32(0):
        entry = np.uint64(slots[slot])
        if (entry ^ key >> _TAG_BITS) & ~mask & np.uint64(0xFFFFFFFF) == np.uint64(0):
            number = np.int64(entry & mask) - 1
            if records[number].key == key:
                return np.int64(slot), number
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot), np.int64(-1)


@inlined
def _form_of(slots: np.ndarray, key: int) -> tuple[int, int]:
    """(slot, number) of the bare form with hash `key`; (the empty slot for it, -1) when it is new.

    Forms are compared by the top of their hash and their slot.
    """
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
def read_bare(lower: np.ndarray, first: int, end: int) -> tuple[int, int]:
    """(hash, syllables) of the bare form lower[first:end], which has at least one syllable.

    Syllables are groups of vowels (a e i o u y); a last e is silent unless it makes the only group or ends -le.
    """
    groups, before, hashed = 0, 0, _ONE
    for index in range(first, end):
        code = lower[index]
        hashed = (hashed ^ np.uint64(code)) * PRIME
        vowel = _VOWELS >> (code - 97) & 1 if 97 <= code <= 122 else 0
        groups += vowel & ~before
        before = vowel
    if groups > 1 and lower[end - 1] == 101 and not among(lower[end - 2], _SILENT_AFTER_NOT):
        groups -= 1
    return mix(hashed), max(groups, 1)


@kernel
def c4_end(lower: np.ndarray, end: int) -> bool:
    """Whether a line with this last word ends as C4 requires, without citation marks such as [3]."""
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
    if class_of(last, classes) & tables.ALPHANUMERIC:
        return 0, 0
    bits = 0
    dots = num_chars >= 3 and last == _DOT and lower[num_chars - 2] == _DOT and lower[num_chars - 3] == _DOT
    if dots or last == _ELLIPSIS_MARK:
        bits |= _ELLIPSIS
    if class_of(last, classes) & tables.TERMINAL:
        bits |= _END
    if c4_end(lower, num_chars) or (last >= 128 and class_of(last, classes) & tables.TERMINAL):
        bits |= _C4_END
    end = num_chars
    while end > 0 and class_of(lower[end - 1], classes) & tables.CLOSER:
        end -= 1
    ends = end > 0 and (lower[end - 1] == 46 or lower[end - 1] == 33 or lower[end - 1] == 63)
    return bits, np.int64(ends)


@inlined
def pattern_flags(lower: np.ndarray, num_chars: int, first: int, end: int, letters: int, alphabet: Alphabet) -> int:
    """The bits of the patterns that the word matches; `letters` is its set of letters, as in `Alphabet.letters`."""
    bits, likely = 0, np.uint64(0)
    for index in range(len(alphabet.modes)):  # without a branch, so that it compiles to vector instructions
        size = alphabet.sizes[index]
        fits = alphabet.letters[index] & ~letters == 0 and (size == 0 or size == num_chars or size == end - first)
        likely |= np.uint64(fits) << np.uint64(index)
    while likely:
        index = zeros_below(likely)
        likely &= likely - _ONE
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
    """Whether the word is a number as in a counter: 3, 1,204, 2.5k, (17."""
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


@functools.cache
def ascii_sums() -> np.ndarray:
    """uint64 [128, 2]: what each ASCII character adds to the counts of a word, as bytes of `low` and `high`.

    LETTERED counts letters here; ellipses and counts that depend on the whole word are not in it.
    """
    sums = np.zeros((128, NUM_COUNTS), np.uint8)
    for code, row in enumerate(sums):
        char = chr(code)
        row[CHARS], row[LETTERED], row[ALNUMS], row[CAPITALS] = 1, char.isalpha(), char.isalnum(), char.isupper()
        row[DIGITS], row[UPPERS] = char.isdigit(), char.isupper()
        for place, marks in ((HASHES, "#"), (PARENS, "()"), (BRACES, "{"), (ATS, "@")):
            row[place] = char in marks
    return sums.view("<u8").astype(np.uint64)


@inlined
def count_of(low: int, high: int, place: int) -> int:
    """One count of a word, unpacked from its bytes."""
    half = low if place < 8 else high
    return np.int64(half >> np.uint64(8 * (place & 7)) & np.uint64(255))


@inlined
def plain_counts(
    data: np.ndarray, start: int, end: int, alphabet: Alphabet, lower: np.ndarray
) -> tuple[int, int, int, int]:
    """(low, high, letters as in Alphabet.letters, classes of any character) of an ASCII word without two dots in a row, and
    the word in lower case in `lower`. `low` is 0 for any other word and for a long one."""
    low = high = letters = np.uint64(0)
    kinds, before = 0, 0
    if end - start > MOST_SMALL:
        return low, high, letters, kinds
    for index in range(end - start):
        code = data[start + index]
        if code >= 128 or (code == _DOT and before == _DOT):
            return np.uint64(0), np.uint64(0), letters, kinds
        before = code
        low += alphabet.sums[code, 0]
        high += alphabet.sums[code, 1]
        kinds |= alphabet.classes[code]
        small = alphabet.lower[code]
        lower[index] = small
        letters |= _ONE << np.uint64(small & 63)
    lettered = count_of(low, high, LETTERED)
    if lettered > 1:
        low -= np.uint64(lettered - 1) << np.uint64(8 * LETTERED)
    elif lettered == 0 and count_of(low, high, DIGITS) > 0:
        high += _ONE << np.uint64(8 * (NUMBERS - 8))
    return low, high, letters, kinds


@kernel
def any_counts(
    data: np.ndarray, start: int, end: int, alphabet: Alphabet, lower: np.ndarray, row: np.ndarray
) -> tuple[int, int, int]:
    """(characters, letters, classes of any character) of any word, its counts in `row`, the word in lower case in `lower`."""
    row[:] = 0
    num_chars, dots, place, letters, kinds = 0, 0, start, np.uint64(0), 0
    while place < end:
        code, width = code_point(data, place)
        place += width
        kind = class_of(code, alphabet.classes)
        kinds |= kind
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
        small = alphabet.lower[code] if code < len(alphabet.lower) else code
        lower[num_chars] = small
        letters |= _ONE << np.uint64(small & 63)
        num_chars += 1
    row[CHARS] = num_chars
    row[NUMBERS] = row[DIGITS] > 0 and row[LETTERED] == 0
    return num_chars, letters, kinds


@inlined
def number_of_urls(lower: np.ndarray, num_chars: int, letters: int) -> int:
    """How many beginnings of web addresses a word contains."""
    if _URL_LETTERS & ~letters and _WWW_LETTERS & ~letters:
        return 0
    urls = 0
    for place in range(num_chars):
        if lower[place] == 104 or lower[place] == 119:
            urls += stands_at(_HTTP, lower, place, num_chars) or stands_at(_HTTPS, lower, place, num_chars)
            urls += stands_at(_WWW, lower, place, num_chars)
    return urls


@inlined
def number_of_form(hashed: int, words: Words) -> int:
    """The number of the bare form with this hash, which is added if new."""
    spot, form = _form_of(words.bare_slots, hashed)
    if form < 0:
        form = words.used[1]
        words.used[1] += 1
        words.bare_slots[spot] = hashed & ~_NUMBER | np.uint64(form + 1)
    return form


@inlined
def add_word(
    data: np.ndarray, start: int, end: int, slot: int, key: int, words: Words, alphabet: Alphabet, toxic: np.ndarray,
    lower: np.ndarray,
) -> int:  # fmt: skip
    """Writes the word data[start:end] with hash `key` to the empty `slot`; returns its number. `lower` is scratch."""
    number = words.used[0]
    words.used[0] += 1
    words.slots[slot] = entry_of(key, number, np.uint64(len(words.slots) - 1))
    row, num_chars = words.wide[words.used[2]], end - start
    low, high, letters, kinds = plain_counts(data, start, end, alphabet, lower)
    if low == 0:
        num_chars, letters, kinds = any_counts(data, start, end, alphabet, lower, row)
        if num_chars <= MOST_SMALL:
            for index in range(8):
                low |= np.uint64(row[index]) << np.uint64(8 * index)
                high |= np.uint64(row[index + 8]) << np.uint64(8 * index)
    first, bare_end = bare_span(lower, num_chars, alphabet.classes) if kinds & tables.EDGE else (0, num_chars)
    bits, ends_sentence = end_flags(lower, num_chars, alphabet.classes)
    if ends_sentence:
        bits |= _ENDS
    bits |= pattern_flags(lower, num_chars, first, bare_end, letters, alphabet)
    if class_of(lower[0], alphabet.classes) & tables.BULLET:
        bits |= _BULLET
    if is_quantity(lower, num_chars, alphabet.classes):
        bits |= _QUANTITY_FLAG
    if bare_end > first:
        bits |= _FILLED
    hashed, vowels = read_bare(lower, first, bare_end)
    if kinds & tables.ALPHABETIC:
        bits |= _LETTER
    else:
        vowels = 0
    urls = number_of_urls(lower, num_chars, letters)
    form = number_of_form(hashed, words)
    words.others[number].bare_hash = hashed
    if len(toxic) and place_of(hashed, toxic) >= 0:
        bits |= _TOXIC
    # A bitmap by the lowest bits of the hash rejects nearly all words without a search.
    perhaps = alphabet.stop_bits[np.int64(hashed >> np.uint64(6) & _STOP_MASK)] >> (hashed & np.uint64(63)) & _ONE
    if perhaps and place_of(hashed, alphabet.stops) >= 0:
        bits |= _STOP
    if num_chars > MOST_SMALL:
        row[SENTENCES] += ends_sentence
        row[SYLLABLES], row[URLS], row[URL_CHARS] = vowels, urls, num_chars if urls else 0
        bits |= _WIDE
        words.others[number].wide_row = words.used[2]
        words.used[2] += 1
    else:
        low += np.uint64(ends_sentence) << np.uint64(8 * SENTENCES)
        high += np.uint64(vowels) << np.uint64(8 * (SYLLABLES - 8)) | np.uint64(urls) << np.uint64(8 * (URLS - 8))
        high += np.uint64(num_chars if urls else 0) << np.uint64(8 * (URL_CHARS - 8))
    record = words.records[number]
    record.key, record.low, record.high = key, low, high
    record.flags = np.uint64(bits) | np.uint64(form) << np.uint64(FORM_SHIFT)
    return number
