"""The kernel that reads a document once: its words, lines and paragraphs, and every count that needs no comparing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hone.data.text import tables
from hone.data.text.hashing import mix
from hone.data.text.segment import code_point, fold, inlined, kernel, word_end
from hone.data.text.tables import LEAD_BYTE, NEWLINE_BYTE, WORD_BYTE, flag
from hone.data.text.words import (
    CAPITALS,
    CHARS,
    FLAGS,
    NUM_COUNTS,
    SENTENCES,
    SMALL_COUNTS,
    WIDE_ROW,
    Alphabet,
    Words,
    add_word,
    is_full,
    look_up,
)  # fmt: skip

(
    WORDS, GAPS, LINES, NEWLINES, MAX_WORD, MAX_LINE, BULLET_LINES, ELLIPSIS_LINES, PUNCTUATED_LINES, SHORT_LINES,
    JAVASCRIPT_LINES, POLICY_LINES, LOREM_IPSUM, STOPS, UPPER_LINES, BOILERPLATE_WORDS, C4_LINES, C4_SENTENCES,
    C4_LOOSE_SENTENCES, LONG_LINES, PARAGRAPHS, TEXT_HASH,
) = range(NUM_COUNTS, NUM_COUNTS + 22)  # fmt: skip
"""Places in the totals of a document, after the sums of its words' counts."""
NUM_TOTALS = TEXT_HASH + 1
_FIRST, _LAST, _ANY, _BEFORE, _SECOND_LAST, _TRAILING, _LONG, _POLICY, _CART = range(NUM_TOTALS, NUM_TOTALS + 9)
"""Places in the state of a line, after the same sums: flags of its first, last and any word, of the two before ..."""
NUM_STATE = _CART + 1

_STOPS = (1 << len(tables.STOP_WORDS)) - 1
_BULLET, _ELLIPSIS, _TERMINAL, _C4 = flag("bullet"), flag("ellipsis"), flag("terminal"), flag("c4_terminal")
_JAVASCRIPT, _LOREM, _IPSUM, _TERMS, _OF = (flag(x) for x in ("javascript", "lorem", "ipsum", "terms", "of"))
_USE_FIRST, _USE_LAST, _USES, _COOKIES = (flag(x) for x in ("use_first", "use_last", "uses", "cookies"))
_PRIVACY, _POLICY_WORD, _COOKIE = (flag(x) for x in ("privacy", "policy", "cookie"))
_THING, _QUANTITY, _SIGN_IN, _READ, _MORE = (flag(x) for x in ("thing", "quantity", "sign_in", "read", "more"))
_ITEMS, _IN, _CART_WORD, _WIDE = (flag(x) for x in ("items", "in", "cart", "wide"))
_PHRASE = _IPSUM | _USE_FIRST | _COOKIES | _POLICY_WORD
MAX_WORD_CHARS, SHORT_LINE_CHARS, LONG_LINE_CHARS, MAX_EDITED_WORDS = 1000, 30, 200, 10
_HIGH = np.uint64(0x100)


class Scratch(NamedTuple):
    """Room for the parts of one document: words (`ids`, `places`: characters before each, one space between), lines, paragraphs."""

    ids: np.ndarray
    places: np.ndarray
    line_hashes: np.ndarray
    line_chars: np.ndarray
    paragraph_hashes: np.ndarray
    paragraph_chars: np.ndarray
    lower: np.ndarray
    line: np.ndarray


@njit(cache=True, nogil=True, boundscheck=False)
def empty_scratch(num_bytes: int) -> Scratch:
    """Room for documents of up to `num_bytes`."""
    most = num_bytes // 2 + 2
    return Scratch(
        np.empty(most, np.int32),
        np.empty(most + 1, np.int64),
        np.empty(most, np.uint64),
        np.empty(most, np.int64),
        np.empty(most, np.uint64),
        np.empty(most, np.int64),
        np.empty(num_bytes + 1, np.int32),
        np.zeros(NUM_STATE, np.int64),
    )


@kernel
def policy_phrase(bits: int, before: int, second: int) -> bool:
    """Whether a policy notice ends with a word of flags `bits`, one space after `before`, one space after `second`."""
    if bits & _POLICY_WORD and before & (_PRIVACY | _COOKIE):
        return True
    if bits & _COOKIES and before & (_USES | _USE_LAST):
        return True
    if before & _OF == 0:
        return False
    return bool((bits & _USE_FIRST and second & _TERMS) or (bits & _COOKIES and second & _USE_LAST))


@kernel
def boilerplate(line: np.ndarray, chars: int) -> int:
    """Words of a line that RefinedWeb's line rules take away."""
    num_words = line[WORDS]
    if num_words == 1 or 2 * line[CAPITALS] > chars:
        return num_words
    if num_words == 2 and line[_FIRST] & _QUANTITY and line[_LAST] & _THING:
        return num_words
    if num_words > MAX_EDITED_WORDS:
        return 0
    removed = 3 if line[_CART] else 0
    removed += 1 if line[_FIRST] & _SIGN_IN else 0
    removed += 2 if line[_LAST] & _MORE and line[_BEFORE] & _READ else 0
    return removed


@kernel
def end_line(line: np.ndarray, hashed: int, total: np.ndarray, scratch: Scratch) -> int:
    """Adds a finished line to the totals and empties it. Returns its characters."""
    chars = line[CHARS] + line[GAPS]
    if line[WORDS]:
        number = total[LINES]
        scratch.line_hashes[number] = hashed
        scratch.line_chars[number] = chars
        last = line[_LAST]
        total[LINES] += 1
        total[MAX_LINE] = max(total[MAX_LINE], chars)
        total[SHORT_LINES] += chars <= SHORT_LINE_CHARS
        total[LONG_LINES] += chars >= LONG_LINE_CHARS
        total[BULLET_LINES] += (line[_FIRST] & _BULLET) != 0
        if not line[_TRAILING]:
            total[ELLIPSIS_LINES] += (last & _ELLIPSIS) != 0
            total[PUNCTUATED_LINES] += (last & _TERMINAL) != 0
        javascript = (line[_ANY] & _JAVASCRIPT) != 0
        total[JAVASCRIPT_LINES] += javascript
        total[POLICY_LINES] += line[_POLICY]
        total[STOPS] |= line[_ANY] & _STOPS
        total[UPPER_LINES] += 2 * line[CAPITALS] > chars
        total[BOILERPLATE_WORDS] += boilerplate(line, chars)
        if line[WORDS] >= 3 and not (line[_LONG] or javascript or line[_POLICY]):
            sentences = max(line[SENTENCES], 1)
            total[C4_LOOSE_SENTENCES] += sentences
            if last & _C4:
                total[C4_LINES] += 1
                total[C4_SENTENCES] += sentences
        for index in range(GAPS):
            total[index] += line[index]
    total[GAPS] += line[GAPS]
    line[:] = 0
    return chars


@inlined
def take_word(number: int, adjacent: bool, words: Words, line: np.ndarray, total: np.ndarray) -> int:
    """Adds word `number` to its line and returns its characters; `adjacent`: one plain space lies before it."""
    bits = np.int64(words.records[number, FLAGS])
    chars = np.int64(words.small[number, 8 * SMALL_COUNTS])
    if bits & _WIDE:
        row = words.records[number, WIDE_ROW]
        chars = np.int64(words.wide[row, CHARS])
        for index in range(NUM_COUNTS):
            line[index] += words.wide[row, index]
    else:
        for index in range(NUM_COUNTS):
            line[index] += words.small[number, 8 * SMALL_COUNTS + index]
    if line[WORDS] == 0:
        line[_FIRST] = bits
    line[WORDS] += 1
    line[_ANY] |= bits
    if chars > total[MAX_WORD]:
        total[MAX_WORD] = chars
    if chars > MAX_WORD_CHARS:
        line[_LONG] = 1
    before, second = line[_LAST], line[_BEFORE]
    if bits & _PHRASE and adjacent:
        # _SECOND_LAST says whether one plain space parts the two words before.
        if bits & _IPSUM and before & _LOREM:
            total[LOREM_IPSUM] += 1
        if policy_phrase(bits, before, second if line[_SECOND_LAST] else 0):
            line[_POLICY] = 1
    if bits & _CART_WORD and before & _IN and second & _ITEMS:
        line[_CART] = 1
    line[_BEFORE] = before
    line[_LAST] = bits
    line[_SECOND_LAST] = adjacent
    return chars


@kernel
def end_paragraph(hashed: int, chars: int, filled: bool, total: np.ndarray, scratch: Scratch) -> None:
    """Notes a finished paragraph that holds a word."""
    if filled:
        scratch.paragraph_hashes[total[PARAGRAPHS]] = hashed
        scratch.paragraph_chars[total[PARAGRAPHS]] = chars
        total[PARAGRAPHS] += 1


@kernel
def scan(
    data: np.ndarray, start: int, end: int, words: Words, toxic: np.ndarray, alphabet: Alphabet, scratch: Scratch,
    total: np.ndarray,
) -> bool:  # fmt: skip
    """Reads data[start:end] into `scratch` and `total` (int64 [NUM_TOTALS]); False when `words` is too full to go on."""
    total[:] = 0
    line = scratch.line
    line[:] = 0
    count, place = 0, start
    scratch.places[0] = 0
    whole = part = hashed = np.uint64(1)
    part_chars, part_words, gap_bytes, plain = 0, False, 0, False
    while place < end:
        byte = data[place]
        kind = alphabet.kinds[byte]
        if kind == NEWLINE_BYTE:
            run = place
            while run < end and data[run] == byte:
                run += 1
            run -= place
            part_words = part_words or line[WORDS] > 0
            part_chars += end_line(line, mix(hashed), total, scratch)
            part, whole = mix(fold(part, hashed)), mix(fold(whole, hashed) + np.uint64(run))
            if run == 1:
                part, part_chars = fold(part, _HIGH), part_chars + 1
            else:
                end_paragraph(part, part_chars, part_words, total, scratch)
                part, part_chars, part_words = np.uint64(1), 0, False
            total[NEWLINES] += run
            hashed, gap_bytes = np.uint64(1), 0
            place += run
            continue
        width = 1
        if kind == LEAD_BYTE:
            width = 0
            code, size = code_point(data, place)
            for space in alphabet.spaces:
                if code == space:
                    width = size
        if kind != WORD_BYTE and width > 0:
            for index in range(place, place + width):
                hashed = fold(hashed, _HIGH + np.uint64(data[index]))
            line[GAPS] += 1
            line[_TRAILING] = 1
            gap_bytes += 1
            plain = byte == 32
            place += width
            continue
        stop, key = word_end(data, place, end, alphabet.kinds, alphabet.spaces)
        slot, number = look_up(words.slots, words.records, key)
        if number < 0:
            if is_full(words):
                return False
            number = add_word(data, place, stop, slot, key, words, alphabet, toxic, scratch.lower)
        chars = take_word(number, gap_bytes == 1 and plain and line[WORDS] > 0, words, line, total)
        scratch.ids[count] = number
        scratch.places[count + 1] = scratch.places[count] + chars + 1
        count += 1
        line[_TRAILING] = 0
        hashed, gap_bytes, place = fold(hashed, key), 0, stop
    part_words = part_words or line[WORDS] > 0
    part_chars += end_line(line, mix(hashed), total, scratch)
    end_paragraph(mix(fold(part, hashed)), part_chars, part_words, total, scratch)
    total[TEXT_HASH] = np.int64(mix(fold(whole, hashed)))
    return True
