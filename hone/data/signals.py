"""Signals: the columns that all rules use (Gopher, C4, FineWeb, RefinedWeb and more), from one pass over a document."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np

from hone.base.errors import MissingExtra
from hone.text.batch import Texts

DOCUMENT: dict[str, str] = {
    "id": "string",
    "text": "large_string",
    "source": "string",
    "group": "string",
    "kind": "string",
    "family": "uint64",
    "url": "string",
    "metadata": "string",
    "language": "string",
    "language_score": "float64",
}
"""Type of each column known from reading; the signals follow."""

SIGNALS: dict[str, str] = {
    "text_hash": "uint64",
    "bytes": "int64",
    "chars": "int64",
    "words": "int64",
    "lines": "int64",
    "sentences": "int64",
    "mean_word_chars": "float64",
    "max_word_chars": "int64",
    "max_line_chars": "int64",
    "hash_ratio": "float64",
    "ellipsis_ratio": "float64",
    "bullet_lines": "float64",
    "ellipsis_lines": "float64",
    "alpha_words": "float64",
    "stop_words": "int64",
    "punctuated_lines": "float64",
    "short_lines": "float64",
    "newline_ratio": "float64",
    "javascript_lines": "float64",
    "policy_lines": "float64",
    "lorem_ipsum": "int64",
    "braces": "int64",
    "urls": "int64",
    "digit_ratio": "float64",
    "upper_ratio": "float64",
    "unique_words": "float64",
    "compression_ratio": "float64",
    "dup_lines": "float64",
    "dup_line_chars": "float64",
    "dup_paragraphs": "float64",
    "dup_paragraph_chars": "float64",
    **{f"top_{n}gram_chars": "float64" for n in (2, 3, 4)},
    **{f"dup_{n}gram_chars": "float64" for n in range(5, 11)},
    "mtld": "float64",
    "flesch": "float64",
    "non_alnum_ratio": "float64",
    "whitespace_ratio": "float64",
    "paren_ratio": "float64",
    "url_ratio": "float64",
    "number_words": "float64",
    "upper_lines": "float64",
    "boilerplate_words": "float64",
    "c4_lines": "float64",
    "c4_sentences": "int64",
    "c4_loose_sentences": "int64",
    "long_lines": "int64",
    "emails": "int64",
    "public_ips": "int64",
    "phones": "int64",
    "cards": "int64",
    "unspaced_words": "float64",
    "language_stop_words": "int64",
}
"""Type of each column. Ratios are per word or per character, fractions are of lines, words or characters; 0 where the
document has none. Words end at Unicode white space; in scripts without spaces each character or cluster of text/units.py is a
word, with the punctuation at it. Lengths are in characters. Columns not explained by their names:

text_hash: 64-bit hash of the words and the spaces and line breaks between them.
unique_words: distinct words without case and surrounding punctuation, per word.
compression_ratio: bytes per byte of zstd at level 1, each document alone; repetition raises it.
dup_*, top_*: of lines, paragraphs and word n-grams that occurred before in the document, and of the most frequent n-gram; exact.
mtld: mean length of stretches of words until the share of distinct ones falls to 0.72 (McCarthy and Jarvis 2010,
doi:10.3758/BRM.42.2.381). flesch: reading ease (Flesch 1948, doi:10.1037/h0057532), English syllables as vowel groups.
upper_lines: lines of which more than half is upper case. boilerplate_words: words removed by RefinedWeb's line rules.
c4_lines: lines that C4 keeps; c4_sentences: sentences in them; c4_loose_sentences: the same without the rule that a line
ends with punctuation, as FineWeb runs it; sentences end with a full stop, ! or ? before white space, or a mark of TERMINAL_MARKS.
long_lines, short_lines: lines of at least 200, at most 30 characters; 100 and 14 words of scripts without spaces are as long.
unspaced_words: words that follow another without a space, per word. stop_words: different English ones of Gopher's eight;
language_stop_words: different ones of the document's language (text/languages.json), up to eight; the English where it has no list.
emails, public_ips, phones, cards: matches of personal data that pass a check (RFC 5321 shape, public IPv4 range,
E.164 or North American grouping, Luhn).
"""

MAX_MARKS = 300
"""More consecutive combining marks occur in no script: Unicode's stream-safe format allows 30 (UAX 15, 13)."""
_SPLIT_MARKS = {"\u0f73": "\u0f71\u0f72", "\u0f75": "\u0f71\u0f74", "\u0f81": "\u0f71\u0f80"}
"""Tibetan vowels that are no marks and decompose into two."""


def is_piled(text: str) -> bool:
    """Whether more than MAX_MARKS combining marks in a row are not in the order of NFC.

    Sorting them takes time quadratic in their number: hours for a megabyte. A run that long contains every
    MAX_MARKS-th character, so only these are checked first.
    """
    sample = text[::MAX_MARKS]
    if sample.isascii():
        return False
    end = 0
    for number, character in enumerate(sample):
        place = number * MAX_MARKS
        if place >= end and _is_mark(character):
            begin = end = place
            while begin and _is_mark(text[begin - 1]):
                begin -= 1
            while end < len(text) and _is_mark(text[end]):
                end += 1
            parts = (_SPLIT_MARKS.get(mark, mark) for mark in text[begin:end])
            classes = [unicodedata.combining(part) for mark in parts for part in mark]
            if end - begin > MAX_MARKS and any(one > other for one, other in itertools.pairwise(classes)):
                return True
    return False


def _is_mark(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _SPLIT_MARKS


def normalize(text: str) -> str:
    """Text that is not `is_piled` as stored: NFC, line ends as '\\n', no space at line ends or around the text."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "\n".join([line.rstrip(" \t") for line in text.split("\n")]).strip("\n").rstrip()


def signals_of(texts: Texts, languages: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Every column of SIGNALS for each of `texts`, as an array [num_texts] of the type in SIGNALS.

    `languages` has the code of each text's language, whose stop words are counted; without it the English are.
    """
    try:
        from hone.text.signals import measure
    except ImportError as error:
        raise MissingExtra.of("measuring texts", error.name or "numba", "data") from None
    counts, mtld = measure.counts_of(texts, codes=languages)
    columns = measure.columns_of(counts)
    columns["bytes"] = np.diff(texts.offsets)
    columns["mtld"] = mtld
    columns["compression_ratio"] = columns["bytes"] / np.maximum(_compressed(texts), 1)
    return {name: columns[name].astype(kind, copy=False) for name, kind in SIGNALS.items()}


def signals(text: str, language: str = "") -> dict[str, float | int]:
    """The value of every column in SIGNALS for one document."""
    return {name: column[0].item() for name, column in signals_of(Texts.of([text]), [language]).items()}


def _compressed(texts: Texts) -> np.ndarray:
    """int64 [num_texts]: bytes of each text compressed by zstd at level 1."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.of("measuring texts", "zstandard", "data") from None
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=False)
    data = memoryview(np.ascontiguousarray(texts.data))
    places = texts.offsets.tolist()
    return np.fromiter(
        (len(compressor.compress(data[start:end])) for start, end in itertools.pairwise(places)),
        np.int64,
        texts.num_texts,
    )
