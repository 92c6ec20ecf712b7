"""Segmentation: the words of texts in all scripts, for deduplication, decontamination, signals and edits.

Where a script writes spaces between words, a word is a longest run of letters, digits, underscores and the marks that combine
with them, in lower case letter by letter. Other scripts have words of one character: Han, kana, bopomofo and Yi, and for Thai,
Lao, Khmer, Burmese and their like one cluster, which is a consonant with its vowels, tones and the consonants stacked
below (the extended grapheme clusters of Unicode's UAX 29, with the vowels written before or after a consonant; Theeramunkong
et al. 2000, doi:10.1145/355214.355225). Tibetan syllables end at their tsheg, as words end at a space. Hangul is written with
spaces, but writers differ in where: of copies without a tenth of their spaces 5 % share a band of MinHash by spaced words and all by
syllables, of copies with 1 % of the syllables changed 74 % and all, and unrelated texts are as unlike. So its syllables are words.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np

from hone.text.compiled import entry, inlined, kernel
from hone.text.hashing import BASIS, PRIME, TABLE_SIZE, code_point, word_table
from hone.text.segment import next_within

POINT = np.uint32((1 << 21) - 1)
"""Bits of a code point in `unit_table`; the bits above are its kind."""
MARK, STACK, TAIL, ALONE, LEAD = (np.uint32(kind << 21) for kind in range(1, 6))
"""Kinds of characters besides 0 (letters; with code point 0, what is between words). MARK and STACK belong to the word before them,
after STACK the next consonant does too; TAIL is a vowel written after its consonant; ALONE begins a word; LEAD is a vowel
written before its consonant, and begins the word of both."""

_ALONE = (
    (0x0E00, 0x0E7F), (0x0E80, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF),
    (0x1B00, 0x1B7F), (0xA980, 0xA9DF), (0xA9E0, 0xA9FF), (0xAA60, 0xAADF),  # Thai to Khmer; Tai, Balinese, Javanese
    (0x3005, 0x3007), (0x3021, 0x3029), (0x3031, 0x303C), (0x3041, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF),
    (0xAC00, 0xD7A3), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA48F), (0xF900, 0xFAFF), (0xFF66, 0xFF9F),  # Hangul, Han, kana, Yi
    (0x16FE0, 0x18DFF), (0x1AFF0, 0x1B2FF), (0x20000, 0x33FFF),  # Tangut, kana of old texts, Han
)  # fmt: skip
"""Blocks of scripts without spaces between words: line-breaking classes SA, ID and H2 to H3 of Unicode's UAX 14, and two aksara scripts."""
_LEADS = (*range(0x0E40, 0x0E45), *range(0x0EC0, 0x0EC5), *range(0x19B5, 0x19B8), 0x19BA, 0xAAB5, 0xAAB6, 0xAAB9, 0xAABB, 0xAABC)  # fmt: skip
"""Unicode's property Logical_Order_Exception."""
_TAILS = (0x0E30, 0x0E32, 0x0E33, 0x0E45, 0x0EB0, 0x0EB2, 0x0EB3, 0x0EBD, *range(0x19B0, 0x19CA), 0xAAB1, 0xAABA, 0xAABD, 0xFF9E, 0xFF9F)  # fmt: skip
_STACKS = (0x1039, 0x17D2, 0x1A60, 0x1B44, 0xA9C0)
"""Viramas that stack the next consonant below: of Burmese, Khmer, Tai Tham, Balinese and Javanese."""
_JOINER = 0x200D


@functools.cache
def unit_table() -> np.ndarray:
    """For each code point (uint32 [212992]) its lower case, as in `word_table`, with its kind in the bits above; 0 between words."""
    table = word_table().copy()
    for first, last in _ALONE:
        for point in range(first, last + 1):
            if table[point] and unicodedata.category(chr(point)) != "Nd":
                table[point] |= ALONE
    for points, kind in ((_TAILS, TAIL), (_LEADS, LEAD)):
        for point in points:
            table[point] = kind | np.uint32(point)
    for point in range(TABLE_SIZE):
        if point == _JOINER or unicodedata.category(chr(point)).startswith("M"):
            table[point] = MARK | np.uint32(point)
    for point in _STACKS:
        table[point] = STACK | np.uint32(point)
    table.flags.writeable = False
    return table


@inlined
def unit_of(data, place, end, table):
    """(value in `table` of the character that begins at `place`, its bytes)."""
    byte = data[place]
    if byte < 128:
        return table[byte], np.int64(1)
    point, step = code_point(data, place, end)
    return (table[point] if point < TABLE_SIZE else np.uint32(0)), step


@inlined
def next_word(data, place, end, table):
    """(begin, end, where to look for the next, hash) of the first word at or after `place`; begins at `end` when there is none.

    The hash (uint64) is FNV-1a over the code points, in lower case.
    """
    letter, step = np.uint32(0), np.int64(0)
    while place < end:
        letter, step = unit_of(data, place, end, table)
        if letter != 0 and (letter < MARK or letter >= TAIL):
            break
        place += step
    begin, hashed = place, BASIS
    if place >= end:
        return end, end, end, hashed
    if letter < MARK:
        hashed = (hashed ^ np.uint64(letter)) * PRIME
        place += step
        while place < end:
            byte = data[place]
            if byte < 128:  # apart, because most text is: no character of ASCII is a mark
                letter = table[byte]
                if letter == 0:
                    return begin, place, place + 1, hashed
                hashed = (hashed ^ np.uint64(letter)) * PRIME
                place += 1
                continue
            letter, step = unit_of(data, place, end, table)
            if letter == 0:
                return begin, place, place + step, hashed
            if letter >= TAIL:
                break
            hashed = (hashed ^ np.uint64(letter & POINT)) * PRIME
            place += step
        return begin, place, place, hashed
    joins = letter >= LEAD
    while True:
        hashed = (hashed ^ np.uint64(letter & POINT)) * PRIME
        place += step
        if place >= end:
            break
        letter, step = unit_of(data, place, end, table)
        if letter < MARK or letter >= LEAD or (letter >= ALONE and not joins):
            break
        joins = STACK <= letter < TAIL
    return begin, place, place, hashed


@entry
def spans_of(data, table):
    """Begin and end of every word of one text: int64 [words, 2]."""
    spans = np.empty((len(data) + 1, 2), np.int64)
    count, place = 0, np.int64(0)
    while True:
        spans[count, 0], spans[count, 1], place, _ = next_word(data, place, len(data), table)
        if spans[count, 0] == len(data):
            return spans[:count].copy()
        count += 1


def words_of(text: str) -> list[str]:
    """The words of `text` as they are written."""
    raw = text.encode()
    return [raw[begin:end].decode() for begin, end in spans_of(np.frombuffer(raw, np.uint8), unit_table()).tolist()]


@kernel
def is_joined(one, other):
    """Whether a word goes on from a character of value `one` in `unit_table` to its neighbour of value `other`."""
    if other == 0 or other >= LEAD:
        return False
    if MARK <= other < TAIL:
        return True
    if other < MARK:
        return 0 < one < TAIL
    if other < ALONE:
        return one >= MARK
    return one >= LEAD or STACK <= one < TAIL


@kernel
def next_unspaced(data, place, end, table):
    """The offset of the first character at or after `place` that is of a script without spaces; `end` when there is none."""
    while True:
        place = next_within(data, place, end, 0xE0, 0xF0)
        if place >= end:
            return end
        letter, step = unit_of(data, place, end, table)
        if letter >= TAIL or is_tsheg(data, place, end):
            return place
        place += step


@inlined
def is_tsheg(data, place, end):
    """Whether the character at `place` is U+0F0B or U+0F0C, which end a syllable of Tibetan."""
    if data[place] != 0xE0 or place + 3 > end:
        return False
    return data[place + 1] == 0xBC and (data[place + 2] == 0x8B or data[place + 2] == 0x8C)


@kernel
def part_words(data, runs, run, num_runs, place, table, edges):
    """Parts runs of characters without white space into words: writes the begin and end of each next word into `edges` (int64
    [n]) until it is full or `num_runs` runs are done. Returns (words, the run to go on with, where in it).

    `runs` holds begin and end of each. Characters between words belong to the word before them, at the begin of a run to
    the one after; a run of spaced scripts alone is one word, but for Tibetan, of which each syllable is.
    """
    count = 0
    while run < num_runs and 2 * count + 2 <= len(edges) - 1:
        end = runs[2 * run + 1]
        begin, letters, parted = place, False, False  # whether the word has a letter, and is of a script without spaces
        before = np.uint32(0)
        while place < end:
            letter, step = unit_of(data, place, end, table)
            if letter == 0:
                before = letter
                parted |= is_tsheg(data, place, end)
                place += step
                continue
            goes_on = parted and before != 0 and letter >= MARK and is_joined(before, letter)
            if letters and (letter >= TAIL or parted) and not goes_on:
                break
            if letter >= TAIL:
                parted = True
            letters = True
            before = letter
            place += step
        edges[2 * count], edges[2 * count + 1] = begin, place
        count += 1
        if place >= end:
            run += 1
            place = runs[2 * run]
    return count, run, place
