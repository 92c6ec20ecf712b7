"""Measure: reads every document of a batch once and writes all its counts to one row."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hone.text import tables
from hone.text.batch import Texts
from hone.text.compiled import entry, kernel
from hone.text.hashing import mix
from hone.text.segment import find, fold, place_of
from hone.text.signals import personal
from hone.text.signals import scan as s
from hone.text.signals import words as w
from hone.text.signals.counts import COUNTS, WORD_COUNTS
from hone.text.signals.languages import languages
from hone.text.signals.repeats import Table, capacity_for, diversity, duplicates, empty_table, ngrams
from hone.text.signals.scan import Scratch, empty_scratch, scan
from hone.text.signals.words import ATS, DIGITS, Alphabet, Words, empty_words
from hone.text.units import unit_table

_ROOM_WORDS = 1 << 15
"""Capacity for distinct words, which stay in the table between documents; less for a batch of few bytes. When it is three
quarters full the table is emptied: it should fit a core's share of the cache."""
_LEAST_DIGITS = 4
_TOXIC_FIRST = tables.flag("toxic_first")
_STOP = tables.flag("stop_any")
MOST_STOP_WORDS = 8
"""Stop words are counted up to this number."""
_LATEST = (1 << 31) - 1


@kernel
def phrase_hash(words: Words, ids: np.ndarray, first: int, end: int) -> int:
    """Hash of the bare forms of words first..end of a document; never 0."""
    hashed = np.uint64(7)
    for index in range(first, end):
        hashed = fold(hashed, words.others[ids[index]].bare_hash)
    return max(mix(hashed), np.uint64(1))


@kernel
def toxic_words(words: Words, ids: np.ndarray, num_words: int, phrases: np.ndarray, longest: int) -> int:
    """The number of words at which a phrase begins whose hash is in the table `phrases`."""
    hits = 0
    for place in range(num_words):
        if words.records[ids[place]].flags & np.uint64(_TOXIC_FIRST):
            for size in range(1, min(longest, num_words - place) + 1):
                key = phrase_hash(words, ids, place, place + size)
                if phrases[find(phrases, key)] == key:
                    hits += 1
                    break
    return hits


@kernel
def stop_words(
    words: Words, ids: np.ndarray, num_words: int, alphabet: Alphabet, language: int, seen: np.ndarray
) -> int:
    """How many different stop words of the language with this number a document has, at most len(seen); `seen` is scratch."""
    count = 0
    for place in range(num_words):
        if words.records[ids[place]].flags & np.uint64(_STOP) == np.uint64(0):
            continue
        number = place_of(words.others[ids[place]].bare_hash, alphabet.stops)
        known = alphabet.stops_of[number, language] == 0
        for index in range(count):
            known |= seen[index] == number
        if not known:
            seen[count] = number
            count += 1
            if count == len(seen):
                break
    return count


@kernel
def repeats(scratch: Scratch, table: Table, row: np.void, filled: int, last: np.ndarray, clock: int) -> float:
    """Writes the counts of repeats to `row`; `filled` entries of `scratch.forms` are used. Returns MTLD."""
    row.dup_lines, row.dup_line_chars = duplicates(scratch.line_hashes, scratch.line_chars, row.lines, table)
    row.dup_paragraphs, row.dup_paragraph_chars = duplicates(
        scratch.paragraph_hashes, scratch.paragraph_chars, row.paragraphs, table
    )
    ngrams(scratch.ids, scratch.places, row.words, table, row.ngrams)
    # The buffers for n-grams are reused.
    row.different, mtld = diversity(scratch.forms, filled, last, clock, table.chosen, table.grams)
    return mtld


@entry
def measure(
    data: np.ndarray, offsets: np.ndarray, languages: np.ndarray, alphabet: Alphabet, toxic: np.ndarray,
    phrases: np.ndarray, longest: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(counts COUNTS [n], MTLD float64 [n]) of n documents in `languages` (int64 [n], -1 for others)."""
    num_texts = len(offsets) - 1
    largest = s.ZERO
    for index in range(num_texts):
        largest = max(largest, offsets[index + 1] - offsets[index])
    scratch, table = empty_scratch(largest), empty_table(largest)
    room = min(capacity_for(np.int64(offsets[num_texts] - offsets[0]) // 32), _ROOM_WORDS)
    words = empty_words(room, largest)
    last, clock = np.zeros(room, np.int32), s.ONE
    firsts, ends, seen = np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(MOST_STOP_WORDS, np.int64)
    counts, mtld, blank = np.zeros(num_texts, COUNTS), np.zeros(num_texts), np.zeros(1, COUNTS)
    for index in range(num_texts):
        start, end, row = offsets[index], offsets[index + 1], counts[index]
        if words.used[0] > 3 * (len(words.records) >> 2):
            words = empty_words(room, largest)
            last, clock = np.zeros(room, np.int32), s.ONE
        filled = scan(data, start, end, words, toxic, alphabet, scratch, row)
        while filled < 0:
            more = 4 * len(words.records)
            words = empty_words(more, more + largest)
            last, clock = np.zeros(more, np.int32), s.ONE
            counts[index] = blank[0]
            filled = scan(data, start, end, words, toxic, alphabet, scratch, row)
        if longest > 0:
            row.toxic = toxic_words(words, scratch.ids, row.words, phrases, longest)
        row.own_stops = -1
        if languages[index] >= 0:
            row.own_stops = stop_words(words, scratch.ids, row.words, alphabet, languages[index], seen)
        if clock > _LATEST - filled:
            last[:], clock = 0, s.ONE
        mtld[index] = repeats(scratch, table, row, filled, last, clock)
        clock += filled
        if row.word_counts[ATS]:
            row.emails = personal.emails(data, start, end)
        if row.word_counts[DIGITS] >= _LEAST_DIGITS:
            personal.numbers(data, start, end, row.personal_numbers, firsts, ends)
    return counts, mtld


@entry
def phrase_hashes(data: np.ndarray, offsets: np.ndarray, alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray, int]:
    """(hash of the first word, hash of all words, each [n]; words of the longest) of n phrases; 0 for one without a word."""
    num_texts = len(offsets) - 1
    firsts, wholes = np.zeros(num_texts, np.uint64), np.zeros(num_texts, np.uint64)
    nothing, longest = np.zeros(0, np.uint64), 0
    counts = np.zeros(num_texts, COUNTS)
    for index in range(num_texts):
        total, num_bytes = counts[index], offsets[index + 1] - offsets[index]
        words, scratch = empty_words(capacity_for(num_bytes), num_bytes), empty_scratch(num_bytes)
        scan(data, offsets[index], offsets[index + 1], words, nothing, alphabet, scratch, total)
        if total.words:
            firsts[index] = words.others[scratch.ids[0]].bare_hash
            wholes[index] = phrase_hash(words, scratch.ids, s.ZERO, total.words)
            longest = max(longest, total.words)
    return firsts, wholes, longest


@functools.cache
def _letters() -> Alphabet:
    """The tables without stop words."""
    nothing = np.zeros(0, np.uint64), np.zeros((0, 0), np.uint8), np.zeros(w.STOP_BITS, np.uint64)
    tabled = tables.spaces(), w.ascii_sums(), tables.classes(), tables.lower_case(), *tables.patterns(), unit_table()
    return Alphabet(*tabled, *nothing)


@functools.cache
def alphabet() -> Alphabet:
    """The tables of hone.text.tables, and the stop words of hone.text.signals.languages, as the kernels take them."""
    lists = [language.stop_words for language in languages().values()]
    words = sorted({word for row in lists for word in row})
    texts = Texts.of(words)
    hashes, _, _ = phrase_hashes(_frozen(texts.data), texts.offsets, _letters())
    order = np.argsort(hashes)
    of = np.array([[words[number] in row for row in lists] for number in order], np.uint8)
    bits = np.zeros(w.STOP_BITS, np.uint64)
    np.bitwise_or.at(
        bits, (hashes >> np.uint64(6)).astype(np.int64) % w.STOP_BITS, np.uint64(1) << hashes % np.uint64(64)
    )
    return _letters()._replace(stops=hashes[order], stops_of=of, stop_bits=bits)


@functools.lru_cache(maxsize=4)
def phrase_table(lexicon: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, int]:
    """(sorted hashes of first words, table of the phrases, words of the longest) of a lexicon."""
    if not lexicon:  # then the kernel need not be compiled
        return np.zeros(0, np.uint64), np.zeros(16, np.uint64), 0
    texts = Texts.of(lexicon)
    firsts, wholes, longest = phrase_hashes(_frozen(texts.data), texts.offsets, alphabet())
    table = np.zeros(max(1 << (4 * len(wholes)).bit_length(), 16), np.uint64)
    for key in np.unique(wholes[wholes != 0]).tolist():
        slot = key & len(table) - 1
        while table[slot]:
            slot = (slot + 1) & len(table) - 1
        table[slot] = key
    return np.unique(firsts[firsts != 0]), table, longest


def _frozen(data: np.ndarray) -> np.ndarray:
    """A read-only view of `data`: kernels are compiled for this one array type."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def counts_of(
    texts: Texts, lexicon: Sequence[str] = (), codes: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(counts COUNTS [num_texts], MTLD float64 [num_texts]) of `texts`, whose languages have the `codes`."""
    toxic, phrases, longest = phrase_table(tuple(lexicon))
    offsets = np.array(texts.offsets, np.int64)  # a writable copy, as for every call of the kernel
    numbers = {code: number for number, code in enumerate(languages())}
    codes = [""] * texts.num_texts if codes is None else codes
    own = np.array([numbers.get(code, -1) for code in codes], np.int64)
    return measure(_frozen(texts.data), offsets, own, alphabet(), toxic, phrases, longest)


_AS_COUNTED = {
    "text_hash": "text_hash", "words": "words", "lines": "lines", "sentences": "sentences", "max_word_chars": "max_word",
    "max_line_chars": "max_line", "lorem_ipsum": "lorem_ipsum", "braces": "braces", "urls": "urls",
    "c4_sentences": "c4_sentences", "c4_loose_sentences": "c4_loose_sentences", "long_lines": "long_lines", "emails": "emails",
    "public_ips": "addresses", "phones": "phones", "cards": "cards",
}  # fmt: skip
"""Signals that are a count of the document."""
_PER_WORD = {
    "mean_word_chars": "chars", "hash_ratio": "hashes", "ellipsis_ratio": "ellipses", "alpha_words": "lettered",
    "newline_ratio": "newlines", "unique_words": "different", "number_words": "numbers", "boilerplate_words": "boilerplate_words",
    "toxic_words": "toxic", "unspaced_words": "unspaced",
}  # fmt: skip
"""Signals that are a count divided by the words."""
_PER_LINE = {
    "bullet_lines": "bullet_lines", "ellipsis_lines": "ellipsis_lines", "punctuated_lines": "punctuated_lines",
    "short_lines": "short_lines", "javascript_lines": "javascript_lines", "policy_lines": "policy_lines",
    "upper_lines": "upper_lines", "c4_lines": "c4_lines", "dup_lines": "dup_lines",
}  # fmt: skip
"""Signals that are a count divided by the lines."""
_PER_CHAR = {
    "digit_ratio": "digits", "upper_ratio": "uppers", "paren_ratio": "parens", "url_ratio": "url_chars",
    "dup_line_chars": "dup_line_chars", "dup_paragraph_chars": "dup_paragraph_chars",
    **{f"top_{n}gram_chars": f"{n}grams" for n in (2, 3, 4)},
    **{f"dup_{n}gram_chars": f"{n}grams" for n in range(5, 11)},
}  # fmt: skip
"""Signals that are a count divided by the characters."""


def columns_of(counts: np.ndarray) -> dict[str, np.ndarray]:
    """The signal columns computed from `counts` (COUNTS [n]) of n documents."""
    of = dict(zip(WORD_COUNTS, counts["word_counts"].T, strict=True))
    of |= {name: counts[name] for name in counts.dtype.names}
    of |= {f"{n}grams": column for n, column in enumerate(counts["ngrams"].T, start=2)}
    of |= zip(("addresses", "phones", "cards"), counts["personal_numbers"].T)
    blank = of["gaps"] + of["newlines"]
    chars, stops = of["chars"] + blank, of["stops"]
    num_words, num_lines, num_chars = (np.maximum(values, 1) for values in (of["words"], of["lines"], chars))
    lettered = np.maximum(of["lettered"], 1)
    columns = {
        "chars": chars,
        "stop_words": sum(stops >> bit & 1 for bit in range(len(tables.STOP_WORDS))),
        "non_alnum_ratio": (chars - of["alnums"]) / num_chars,
        "whitespace_ratio": blank / num_chars,
        "flesch": np.where(
            of["lettered"] > 0,
            206.835 - 1.015 * lettered / np.maximum(of["sentences"], 1) - 84.6 * of["syllables"] / lettered,
            0.0,
        ),
        "dup_paragraphs": of["dup_paragraphs"] / np.maximum(of["paragraphs"], 1),
    }
    columns["language_stop_words"] = np.where(of["own_stops"] >= 0, of["own_stops"], columns["stop_words"])
    columns |= {name: of[count] for name, count in _AS_COUNTED.items()}
    for names, divisor in ((_PER_WORD, num_words), (_PER_LINE, num_lines), (_PER_CHAR, num_chars)):
        columns |= {name: of[count] / divisor for name, count in names.items()}
    return columns


def signals_of(texts: Texts, codes: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The signals that are counted, of `texts` in languages with the `codes`, each [num_texts]."""
    counts, mtld = counts_of(texts, codes=codes)
    return {**columns_of(counts), "bytes": np.diff(texts.offsets), "mtld": mtld}
