"""Kernels of line edits: which lines C4 and RefinedWeb cut out of a page, by which rule, and which phrases inside of lines."""

from __future__ import annotations

import functools

import numpy as np

from hone.text.compiled import entry
from hone.text.segment import code_point
from hone.text.tables import COUNTED_THINGS, UPPER_CASE, classes

LONG_WORD, PUNCTUATION, FEW_WORDS, JAVASCRIPT, POLICY, CITATION = range(6)
"""C4's rules in the order in which they are tried."""
UPPER, NUMERIC, COUNTER, ONE_WORD, PHRASE = range(5)
"""RefinedWeb's."""
POLICY_PHRASES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
_FIRST_PHRASE, _LAST_PHRASE, _ANY_PHRASE = "sign-in", "read more...", "items in cart"


def _packed(phrases: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 bytes of all phrases, int64 offsets)."""
    raw = [phrase.encode() for phrase in phrases]
    return np.frombuffer(b"".join(raw), np.uint8).copy(), np.cumsum([0, *map(len, raw)])


_SCRIPT, _SCRIPT_ENDS = _packed(("javascript",))
_POLICY, _POLICY_ENDS = _packed(POLICY_PHRASES)
_THINGS, _THING_ENDS = _packed(COUNTED_THINGS)
_PHRASES, _PHRASE_ENDS = _packed((_FIRST_PHRASE, _LAST_PHRASE, _ANY_PHRASE))
_TABLED = 0x3400


@functools.cache
def numeric() -> np.ndarray:
    """bool [_TABLED]: str.isnumeric of every code point below CJK."""
    return np.array([chr(code).isnumeric() for code in range(_TABLED)])


@functools.cache
def upper() -> np.ndarray:
    """bool [n]: str.isupper of every code point below n."""
    return (classes() & UPPER_CASE) > 0


@entry
def white(data: np.ndarray, at: int, end: int) -> int:
    """Bytes of the white space character at `at`, as str.isspace; 0 for another character."""
    byte = data[at]
    if byte < 0x80:
        return 1 if byte == 32 or 9 <= byte <= 13 or 28 <= byte <= 31 else 0
    if byte == 0xC2 and at + 1 < end:
        return 2 if data[at + 1] == 0x85 or data[at + 1] == 0xA0 else 0
    if 0xE1 <= byte <= 0xE3 and at + 2 < end:
        code, _ = code_point(data, at)
        if code == 0x1680 or 0x2000 <= code <= 0x200A or code == 0x205F or code == 0x3000:
            return 3
        return 3 if code == 0x2028 or code == 0x2029 or code == 0x202F else 0
    return 0


@entry
def small(byte: int) -> int:
    """An ASCII letter in lower case."""
    return byte + 32 if 65 <= byte <= 90 else byte


@entry
def starts(data: np.ndarray, at: int, end: int, phrases: np.ndarray, low: int, high: int) -> bool:
    """Whether data[at:end] begins with phrases[low:high], whatever the case."""
    place = 0
    while low + place < high and at + place < end and small(data[at + place]) == phrases[low + place]:
        place += 1
    return low + place == high


@entry
def contains(data: np.ndarray, start: int, end: int, phrases: np.ndarray, ends: np.ndarray) -> bool:
    """Whether one of the phrases is in data[start:end]."""
    for at in range(start, end):
        byte = small(data[at])
        for number in range(len(ends) - 1):
            if byte == phrases[ends[number]] and starts(data, at, end, phrases, ends[number], ends[number + 1]):
                return True
    return False


@entry
def citation(data: np.ndarray, at: int, end: int) -> int:
    """Where the citation mark that begins at `at` ends ([], [12], [edit], [citation needed]); `at` when there is none."""
    if data[at] != 91:
        return at
    place = at + 1
    while place < end and 48 <= data[place] <= 57:
        place += 1
    if place < end and data[place] == 93:
        return place + 1
    for word in (b"edit]", b"citation needed]"):
        if end - at > len(word):
            same = True
            for index in range(len(word)):
                same = same and data[at + 1 + index] == word[index]
            if same:
                return at + 1 + len(word)
    return at


@entry
def _words(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """(words of a line, characters of the longest)."""
    words, longest, size, at = 0, 0, 0, start
    while at < end:
        width = white(data, at, end)
        if width:
            size = 0
            at += width
            continue
        words += size == 0
        size += 1
        longest = max(longest, size)
        at += code_point(data, at)[1]
    return words, longest


@entry
def _punctuated(data: np.ndarray, start: int, end: int, citations: bool) -> bool:
    """Whether a line, without citation marks when `citations`, ends with . ? ! \" or ' and not with an ellipsis."""
    last, before, third = 0, 0, 0
    at = start
    while at < end:
        if citations and data[at] == 91:
            stop = citation(data, at, end)
            if stop > at:
                at = stop
                continue
        third, before, last = before, last, np.int64(data[at])
        at += 1
    if last == 46:
        return not (before == 46 and third == 46)
    return last == 63 or last == 33 or last == 34 or last == 39


@entry
def _c4_rule(
    data: np.ndarray, start: int, end: int, marks: bool, min_words: int, max_chars: int, script: bool, policy: bool,
    cite: bool,
) -> int:  # fmt: skip
    """The rule by which C4 cuts a line, -1 for a line that stays."""
    words, longest = _words(data, start, end)
    if max_chars > 0 and longest > max_chars:
        return LONG_WORD
    if marks and not _punctuated(data, start, end, cite):
        return PUNCTUATION
    if words < min_words:
        return FEW_WORDS
    if script and contains(data, start, end, _SCRIPT, _SCRIPT_ENDS):
        return JAVASCRIPT
    if policy and contains(data, start, end, _POLICY, _POLICY_ENDS):
        return POLICY
    return -1


@entry
def _counter(data: np.ndarray, start: int, end: int) -> bool:
    """Whether a line is a count of likes, shares and so on: '3 likes', '1.2K views'."""
    at = start
    while at < end and data[at] < 0x80 and not (48 <= data[at] <= 57 or 97 <= small(data[at]) <= 122 or data[at] == 95):
        at += 1
    digits = at
    while at < end and (48 <= data[at] <= 57 or data[at] == 44 or data[at] == 46):
        at += 1
    if at == digits or data[digits] == 44 or data[digits] == 46:
        return False
    if at < end and (small(data[at]) == 107 or small(data[at]) == 109 or small(data[at]) == 98):
        at += 1
    gap = at
    while at < end and white(data, at, end):
        at += white(data, at, end)
    if at == gap:
        return False
    for number in range(len(_THING_ENDS) - 1):
        low, high = _THING_ENDS[number], _THING_ENDS[number + 1]
        if starts(data, at, end, _THINGS, low, high):
            rest = at + high - low
            while rest < end and data[rest] < 0x80 and not (48 <= data[rest] <= 57 or 97 <= small(data[rest]) <= 122):
                rest += 1
            if rest == end:
                return True
    return False


@entry
def _refinedweb_rule(
    data: np.ndarray, start: int, end: int, most_upper: float, most_numeric: float, counters: bool, one_word: bool,
    is_upper: np.ndarray, is_numeric: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """(the rule by which RefinedWeb cuts a line or -1, words of the line)."""
    chars, capitals, digits, at = 0, 0, 0, start
    while at < end:
        code, width = code_point(data, at)
        chars += 1
        capitals += code < len(is_upper) and is_upper[code]
        digits += code < len(is_numeric) and is_numeric[code]
        at += width
    words, _ = _words(data, start, end)
    if capitals > most_upper * chars:
        return UPPER, words
    if digits >= most_numeric * chars:
        return NUMERIC, words
    if counters and _counter(data, start, end):
        return COUNTER, words
    if one_word and words == 1:
        return ONE_WORD, words
    return -1, words


@entry
def _phrases(data: np.ndarray, start: int, end: int, out: np.ndarray) -> int:
    """Writes the (start, end) of RefinedWeb's phrases in a short line into `out` (int64 [n, 2]); returns their number."""
    count = 0
    first, last = _PHRASE_ENDS[1], _PHRASE_ENDS[2]
    if starts(data, start, end, _PHRASES, 0, first):
        out[count, 0], out[count, 1] = start, start + first
        count += 1
    if end - start >= last - first and starts(data, end - (last - first), end, _PHRASES, first, last):
        out[count, 0], out[count, 1] = end - (last - first), end
        count += 1
    for at in range(start, end):
        if count < len(out) and starts(data, at, end, _PHRASES, last, _PHRASE_ENDS[3]):
            out[count, 0], out[count, 1] = at, at + _PHRASE_ENDS[3] - last
            count += 1
    return count


@entry
def _lines_of(data: np.ndarray, offsets: np.ndarray) -> int:
    count = len(offsets)
    for at in range(offsets[0], offsets[-1]):
        count += data[at] == 10 or data[at] == 91
    return count


@entry
def c4_cuts(
    data: np.ndarray, offsets: np.ndarray, marks: bool, min_words: int, max_chars: int, script: bool, policy: bool,
    cite: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:  # fmt: skip
    """(text, start, end, rule of each span to cut, lines seen), the spans as byte offsets in their texts.

    The line break after a cut line goes too, or the one before the last line of a text. Blank lines stay.
    """
    most = _lines_of(data, offsets)
    text, begin = np.empty(most, np.int64), np.empty(most, np.int64)
    stop, rule = np.empty(most, np.int64), np.empty(most, np.int64)
    count = lines = 0
    for number in range(len(offsets) - 1):
        base, end = offsets[number], offsets[number + 1]
        line, rows = base, count
        while line < end:
            last = line
            while last < end and data[last] != 10:
                last += 1
            first, final = _stripped(data, line, last)
            if first < final:
                lines += 1
                found = _c4_rule(data, first, final, marks, min_words, max_chars, script, policy, cite)
                if found >= 0:
                    text[count], rule[count] = number, found
                    begin[count], stop[count] = line - base, min(last + 1, end) - base
                    count += 1
                elif cite:
                    at = first
                    while at < final:
                        after = citation(data, at, final)
                        if after > at:
                            text[count], rule[count] = number, CITATION
                            begin[count], stop[count] = at - base, after - base
                            count += 1
                        at = max(after, at + 1)
            line = last + 1
        if count > rows and stop[count - 1] == end - base:
            _trim(data, base, begin, stop, rows, count)
    return text[:count], begin[:count], stop[:count], rule[:count], lines


@entry
def _trim(data: np.ndarray, base: int, begin: np.ndarray, stop: np.ndarray, first: int, count: int) -> None:
    """Moves the begin of the last span of a text, which reaches its end, back over the white space and the cut lines before it."""
    at = count - 1
    place = begin[at]
    while True:
        while place > 0 and (data[base + place - 1] == 32 or 9 <= data[base + place - 1] <= 13):
            place -= 1
        if at == first or stop[at - 1] < place:
            break
        at -= 1
        place = min(place, begin[at])
    begin[count - 1] = place


@entry
def _stripped(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """The line data[start:end] without white space at both ends."""
    while start < end and white(data, start, end):
        start += white(data, start, end)
    while end > start:
        at = end - 1
        while at > start and data[at] & 0xC0 == 0x80:
            at -= 1
        if not white(data, at, end):
            break
        end = at
    return start, end


@entry
def refinedweb_cuts(
    data: np.ndarray, offsets: np.ndarray, most_upper: float, most_numeric: float, counters: bool, one_word: bool,
    most_words: int, is_upper: np.ndarray, is_numeric: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:  # fmt: skip
    """As `c4_cuts`, by RefinedWeb's rules; phrases are cut out of lines of at most `most_words` words."""
    most = 2 * _lines_of(data, offsets) + (offsets[-1] - offsets[0]) // 13 + 4
    text, begin = np.empty(most, np.int64), np.empty(most, np.int64)
    stop, rule = np.empty(most, np.int64), np.empty(most, np.int64)
    spans = np.empty((16, 2), np.int64)
    count = lines = 0
    for number in range(len(offsets) - 1):
        base, end = offsets[number], offsets[number + 1]
        line, rows = base, count
        while line < end:
            last = line
            while last < end and data[last] != 10:
                last += 1
            first, final = _stripped(data, line, last)
            if first < final:
                lines += 1
                found, words = _refinedweb_rule(
                    data, first, final, most_upper, most_numeric, counters, one_word, is_upper, is_numeric
                )
                if found >= 0:
                    text[count], rule[count] = number, found
                    begin[count], stop[count] = line - base, min(last + 1, end) - base
                    count += 1
                elif words <= most_words:
                    for index in range(_phrases(data, first, final, spans)):
                        text[count], rule[count] = number, PHRASE
                        begin[count], stop[count] = spans[index, 0] - base, spans[index, 1] - base
                        count += 1
            line = last + 1
        if count > rows and stop[count - 1] == end - base:
            _trim(data, base, begin, stop, rows, count)
    return text[:count], begin[:count], stop[:count], rule[:count], lines
