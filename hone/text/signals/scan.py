"""The kernel that reads a document once: its words, lines and paragraphs, and every count that needs no comparisons."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hone.text import tables
from hone.text.compiled import allocating, inlined, kernel
from hone.text.hashing import mix
from hone.text.segment import BLOCK, code_point, fetch_ahead, find_words, fold, word_key
from hone.text.signals.counts import LINE
from hone.text.signals.words import (
    CAPITALS,
    CHARS,
    FORM_SHIFT,
    NUM_COUNTS,
    SENTENCES,
    Alphabet,
    Words,
    add_word,
    is_full,
    look_up,
)
from hone.text.tables import flag
from hone.text.units import next_unspaced, part_words

_STOPS = (1 << len(tables.STOP_WORDS)) - 1
_BULLET, _ELLIPSIS, _TERMINAL, _C4 = flag("bullet"), flag("ellipsis"), flag("terminal"), flag("c4_terminal")
_JAVASCRIPT, _LOREM, _IPSUM, _TERMS, _OF = (flag(x) for x in ("javascript", "lorem", "ipsum", "terms", "of"))
_USE_FIRST, _USE_LAST, _USES, _COOKIES = (flag(x) for x in ("use_first", "use_last", "uses", "cookies"))
_PRIVACY, _POLICY_WORD, _COOKIE = (flag(x) for x in ("privacy", "policy", "cookie"))
_THING, _QUANTITY, _SIGN_IN, _READ, _MORE = (flag(x) for x in ("thing", "quantity", "sign_in", "read", "more"))
_ITEMS, _IN, _CART_WORD, _WIDE = (flag(x) for x in ("items", "in", "cart", "wide"))
_PHRASE = _IPSUM | _USE_FIRST | _COOKIES | _POLICY_WORD
_FILLED, _ENDS = flag("filled"), flag("ends")
_RARE = _PHRASE | _CART_WORD | _WIDE
MAX_WORD_CHARS, SHORT_LINE_CHARS, LONG_LINE_CHARS, MAX_EDITED_WORDS = 1000, 30, 200, 10
SHORT_LINE_UNSPACED, LONG_LINE_UNSPACED = 15, 100
"""The same lengths in words of scripts without spaces, of which one says about as much as two letters."""
_HIGH = np.uint64(0x100)
_LANES = np.uint64(0x00FF00FF00FF00FF)
ZERO, ONE = np.int64(0), np.int64(1)
"""Typed zero and one: for a literal 0, which has a type of its own, numba would compile the function again."""
_CHUNK_WORDS = 256
"""Words processed at once: as many as byte sums in 16 bits can hold."""


class Scratch(NamedTuple):
    """Buffers for one document: words (`ids`; `places`: characters before each, with one space where there is white space, times 2,
    plus 1 without white space before it; `forms`: numbers of bare forms, where a word has one), lines, paragraphs; and state between steps."""

    ids: np.ndarray
    forms: np.ndarray
    places: np.ndarray
    line_hashes: np.ndarray
    line_chars: np.ndarray
    paragraph_hashes: np.ndarray
    paragraph_chars: np.ndarray
    lower: np.ndarray
    line: np.ndarray
    edges: np.ndarray
    runs: np.ndarray
    keys: np.ndarray
    tail: np.ndarray
    state: np.ndarray


@allocating
def empty_scratch(num_bytes: int) -> Scratch:
    """Buffers for documents of up to `num_bytes`."""
    most = num_bytes // 2 + 2
    return Scratch(
        np.empty(most, np.int32),
        np.empty(most + 1, np.int32),
        np.empty(most + 1, np.int64),
        np.empty(most, np.uint64),
        np.empty(most, np.int64),
        np.empty(most, np.uint64),
        np.empty(most, np.int64),
        np.empty(num_bytes + 1, np.int32),
        np.zeros(1, LINE),
        np.zeros(2 * _CHUNK_WORDS + 1, np.int64),
        np.zeros(2 * _CHUNK_WORDS + 1, np.int64),
        np.zeros(_CHUNK_WORDS, np.uint64),
        np.zeros(BLOCK + 8, np.uint8),
        np.zeros(4, np.int64),
    )


@inlined
def reset_line(line: np.void) -> None:
    """Clears what is known of a line; its paragraph and the text go on."""
    line.words = line.chars = line.capitals = line.sentences = line.gaps = line.unspaced = 0
    line.first = line.last = line.any = line.before = line.adjacent = 0
    line.long = line.policy = line.cart = 0


@kernel
def policy_phrase(bits: int, before: int, second: int) -> bool:
    """Whether a policy notice ends with a word of flags `bits`, preceded by words of flags `before` and `second`, one space apart."""
    if bits & _POLICY_WORD and before & (_PRIVACY | _COOKIE):
        return True
    if bits & _COOKIES and before & (_USES | _USE_LAST):
        return True
    if before & _OF == 0:
        return False
    return bool((bits & _USE_FIRST and second & _TERMS) or (bits & _COOKIES and second & _USE_LAST))


@kernel
def boilerplate(line: np.void, chars: int) -> int:
    """Words of a line that RefinedWeb's line rules remove."""
    num_words = line.words
    if num_words == 1 or 2 * line.capitals > chars:
        return num_words
    if num_words == 2 and line.first & _QUANTITY and line.last & _THING:
        return num_words
    if num_words > MAX_EDITED_WORDS:
        return 0
    removed = 3 if line.cart else 0
    removed += 1 if line.first & _SIGN_IN else 0
    removed += 2 if line.last & _MORE and line.before & _READ else 0
    return removed


@kernel
def end_line(line: np.void, hashed: int, trailing: bool, total: np.void, scratch: Scratch) -> None:
    """Adds a finished line to the totals and resets it. `trailing`: white space is at its end."""
    chars = line.chars + line.gaps
    if line.words:
        number = total.lines
        scratch.line_hashes[number] = hashed
        scratch.line_chars[number] = chars
        last = line.last
        total.lines += 1
        total.max_line = max(total.max_line, chars)
        unspaced = line.unspaced
        total.short_lines += chars <= SHORT_LINE_CHARS and unspaced < SHORT_LINE_UNSPACED
        total.long_lines += chars >= LONG_LINE_CHARS or unspaced >= LONG_LINE_UNSPACED
        total.unspaced += unspaced
        total.bullet_lines += (line.first & _BULLET) != 0
        if not trailing:
            total.ellipsis_lines += (last & _ELLIPSIS) != 0
            total.punctuated_lines += (last & _TERMINAL) != 0
        javascript = (line.any & _JAVASCRIPT) != 0
        total.javascript_lines += javascript
        total.policy_lines += line.policy
        total.stops |= line.any & _STOPS
        total.upper_lines += 2 * line.capitals > chars
        total.boilerplate_words += boilerplate(line, chars)
        if line.words >= 3 and not (line.long or javascript or line.policy):
            sentences = max(line.sentences, 1)
            total.c4_loose_sentences += sentences
            if last & _C4:
                total.c4_lines += 1
                total.c4_sentences += sentences
        line.paragraph_filled = 1
    total.words += line.words
    total.gaps += line.gaps
    line.paragraph_chars += chars
    reset_line(line)


@kernel
def end_paragraph(hashed: int, line: np.void, total: np.void, scratch: Scratch) -> None:
    """Records a finished paragraph if it has a word, and resets it."""
    if line.paragraph_filled:
        scratch.paragraph_hashes[total.paragraphs] = hashed
        scratch.paragraph_chars[total.paragraphs] = line.paragraph_chars
        total.paragraphs += 1
    line.paragraph_chars, line.paragraph_filled = 0, 0


@kernel
def take_gap(data: np.ndarray, place: int, end: int, line: np.void, total: np.void, scratch: Scratch) -> None:
    """Processes the white space data[place:end] between two words, and the ends of lines and paragraphs in it."""
    hashed, trailing = line.line_hash, False
    while place < end:
        byte = data[place]
        if byte != 10:
            width = 1 if byte < 128 else code_point(data, place)[1]
            for index in range(place, place + width):
                hashed = fold(hashed, _HIGH + np.uint64(data[index]))
            line.gaps += 1
            trailing = True
            place += width
            continue
        run = place
        while run < end and data[run] == byte:
            run += 1
        run -= place
        end_line(line, mix(hashed), trailing, total, scratch)
        part = mix(fold(line.paragraph_hash, hashed))
        line.text_hash = mix(fold(line.text_hash, hashed) + np.uint64(run))
        if run == 1:
            part = fold(part, _HIGH)
            line.paragraph_chars += 1
        else:
            end_paragraph(part, line, total, scratch)
            part = np.uint64(1)
        line.paragraph_hash = part
        total.newlines += run
        hashed, trailing = np.uint64(1), False
        place += run
    line.line_hash = hashed


@inlined
def keep(
    line: np.void, num_words: int, chars: int, capitals: int, sentences: int, gaps: int, last: int, anything: int
) -> None:
    """Adds to a line the counts since the last call."""
    line.words += num_words
    line.chars += chars
    line.capitals += capitals
    line.sentences += sentences
    line.gaps += gaps
    line.last, line.any = last, anything


@kernel
def take_rare(
    number: int, adjacent: bool, before: int, second: int, second_adjacent: bool, words: Words, line: np.void,
    total: np.void,
) -> int:  # fmt: skip
    """Counts that few words need: phrases that end with word `number`, counts above a byte. Returns its characters.

    `before` and `second` are flags of the words before it; `adjacent` and `second_adjacent`: a single plain space precedes
    this word, and the one before.
    """
    bits = np.int64(words.records[number].flags)
    chars = np.int64(words.records[number].low & np.uint64(255))
    if bits & _WIDE:
        row = np.int64(words.others[number].wide_row)
        chars = np.int64(words.wide[row, CHARS])
        for index in range(NUM_COUNTS):
            total.word_counts[index] += words.wide[row, index]
        line.capitals += words.wide[row, CAPITALS]
        line.sentences += words.wide[row, SENTENCES]
        if chars > MAX_WORD_CHARS:
            line.long = 1
    if bits & _PHRASE and adjacent:
        if bits & _IPSUM and before & _LOREM:
            total.lorem_ipsum += 1
        if policy_phrase(bits, before, second if second_adjacent else 0):
            line.policy = 1
    if bits & _CART_WORD and before & _IN and second & _ITEMS:
        line.cart = 1
    return chars


@kernel
def take_words(
    data: np.ndarray, gap: int, first: int, num_words: int, filled: int, words: Words, scratch: Scratch,
    total: np.void,
) -> int:  # fmt: skip
    """Adds `num_words` words, by number, the first of which is the document's word `first`, to their lines.

    `gap` is where the white space before the first begins. Returns the new number of entries of `scratch.forms`, of which
    `filled` are those of earlier words.
    """
    line, edges, ids, places = scratch.line[0], scratch.edges, scratch.ids, scratch.places
    even_low = odd_low = even_high = odd_high = np.uint64(0)
    place, longest = places[first] >> 1, total.max_word
    # Counts that every word changes are local variables, written back only for a gap or a rare word.
    hashed, begun, capitals, sentences, gaps = line.line_hash, place, ZERO, ZERO, ZERO
    since, last, before, anything, adjacent = first, line.last, line.before, line.any, line.adjacent > 0
    fresh = line.words == 0
    for index in range(num_words):
        number = ids[first + index]
        start = edges[2 * index]
        second_adjacent, adjacent = adjacent, False
        if start - gap == 1 and data[gap] == 32:
            hashed = fold(hashed, _HIGH + np.uint64(32))
            gaps += 1
            adjacent = not fresh
        elif start > gap:
            now = first + index
            keep(line, now - since, place - begun - (now - since), capitals, sentences, gaps, last, anything)
            line.before, line.line_hash = before, hashed
            take_gap(data, gap, start, line, total, scratch)
            hashed, begun, capitals, sentences, gaps = line.line_hash, place, ZERO, ZERO, ZERO
            since, anything = now, line.any
            fresh = line.words == 0
            if fresh:
                last, before, second_adjacent = 0, 0, False
        elif first + index > 0:
            place -= 1
            begun -= 1
            places[first + index] = 2 * place + 1
            line.unspaced += 1
            if last & _ENDS:  # no white space follows the full stop
                sentences -= 1
                total.word_counts[SENTENCES] -= 1
        gap = edges[2 * index + 1]
        record = words.records[number]
        flags, low, high = record.flags, record.low, record.high
        bits = np.int64(flags)
        even_low += low & _LANES
        odd_low += low >> np.uint64(8) & _LANES
        even_high += high & _LANES
        odd_high += high >> np.uint64(8) & _LANES
        chars = np.int64(low & np.uint64(255))
        if bits & _RARE:
            chars = take_rare(number, adjacent, last, before, second_adjacent, words, line, total)
        longest = max(longest, chars)
        place += chars + 1
        places[first + index + 1] = 2 * place
        scratch.forms[filled] = np.int32(flags >> np.uint64(FORM_SHIFT))
        filled += (bits & _FILLED) != 0
        capitals += np.int64(high >> np.uint64(8 * (CAPITALS - 8)) & np.uint64(255))
        sentences += np.int64(low >> np.uint64(8 * SENTENCES) & np.uint64(255))
        if fresh:
            line.first, fresh = bits, False
        anything |= bits
        before, last = last, bits
        hashed = fold(hashed, scratch.keys[index])
    now = first + num_words
    keep(line, now - since, place - begun - (now - since), capitals, sentences, gaps, last, anything)
    line.before, line.adjacent, line.line_hash = before, adjacent, hashed
    total.max_word = longest
    sums = total.word_counts
    for index in range(4):
        shift = np.uint64(16 * index)
        sums[2 * index] += np.int64(even_low >> shift & np.uint64(0xFFFF))
        sums[2 * index + 1] += np.int64(odd_low >> shift & np.uint64(0xFFFF))
        sums[2 * index + 8] += np.int64(even_high >> shift & np.uint64(0xFFFF))
        sums[2 * index + 9] += np.int64(odd_high >> shift & np.uint64(0xFFFF))
    return filled


@kernel
def find_numbers(
    data: np.ndarray, first: int, num_words: int, words: Words, toxic: np.ndarray, alphabet: Alphabet, scratch: Scratch
) -> bool:  # fmt: skip
    """Writes the numbers of `num_words` words with known edges into `scratch.ids`, from its index `first` on.

    Each step runs for all words, so that their memory reads overlap. False when `words` is too full.
    """
    edges, keys, ids = scratch.edges, scratch.keys, scratch.ids
    mask = np.uint64(len(words.slots) - 1)
    for index in range(num_words):
        key = word_key(data, edges[2 * index], edges[2 * index + 1])
        fetch_ahead(words.slots, np.int64(key & mask))
        keys[index] = key
    for index in range(num_words):
        fetch_ahead(words.records, np.int64(np.uint64(words.slots[keys[index] & mask]) & mask) - 1)
    for index in range(num_words):
        slot, number = look_up(words.slots, words.records, keys[index])
        if number < 0:
            if is_full(words):
                return False
            start, end = edges[2 * index], edges[2 * index + 1]
            number = add_word(data, start, end, slot, keys[index], words, alphabet, toxic, scratch.lower)
        ids[first + index] = number
    return True


@kernel
def scan(
    data: np.ndarray, start: int, end: int, words: Words, toxic: np.ndarray, alphabet: Alphabet, scratch: Scratch,
    total: np.void,
) -> int:  # fmt: skip
    """Reads data[start:end] into `scratch` and `total`, a zeroed record of COUNTS. Returns the entries of `scratch.forms`; -1 when
    `words` is too full."""
    line, edges, state = scratch.line[0], scratch.edges, scratch.state
    reset_line(line)
    line.paragraph_chars, line.paragraph_filled = 0, 0
    line.text_hash = line.paragraph_hash = line.line_hash = np.uint64(1)
    scratch.places[0] = 0
    state[0], state[1], state[2], state[3] = start, 1, 0, 0
    count, filled, gap = ZERO, ZERO, start
    unspaced = next_unspaced(data, start, end, alphabet.units) < end
    runs = scratch.runs if unspaced else edges
    while state[0] < end:
        found = find_words(data, end, alphabet.spaces, runs, scratch.tail, state)
        num_runs, run, place = found >> 1, ZERO, runs[0]
        while run < num_runs:
            num_words = num_runs
            if unspaced:
                num_words, run, place = part_words(data, runs, run, num_runs, place, alphabet.units, edges)
            else:
                run = num_runs
            if not find_numbers(data, count, num_words, words, toxic, alphabet, scratch):
                return -1
            filled = take_words(data, gap, count, num_words, filled, words, scratch, total)
            count += num_words
            gap = edges[2 * num_words - 1]
        runs[0] = runs[2 * num_runs]
    trailing = gap < end and data[end - 1] != 10
    take_gap(data, gap, end, line, total, scratch)
    end_line(line, mix(line.line_hash), trailing, total, scratch)
    end_paragraph(mix(fold(line.paragraph_hash, line.line_hash)), line, total, scratch)
    total.text_hash = mix(fold(line.text_hash, line.line_hash))
    return filled
