"""Signals: the columns that all rules use (Gopher, C4, FineWeb, RefinedWeb and more), from one pass over a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hone.base.errors import MissingExtra
from hone.base.lazy import resolve
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


class Signal(NamedTuple):
    """A column: its `kind` of numbers, and 'module:function' of what computes it, '' for those that the scan of all documents counts.

    The function takes (Texts, the columns computed so far) and returns an array [num_texts].
    """

    kind: str
    function: str = ""


_INT, _FLOAT = Signal("int64"), Signal("float64")
SIGNALS: dict[str, Signal] = {
    "text_hash": Signal("uint64"),
    "bytes": _INT,
    "chars": _INT,
    "words": _INT,
    "lines": _INT,
    "sentences": _INT,
    "mean_word_chars": _FLOAT,
    "max_word_chars": _INT,
    "max_line_chars": _INT,
    "hash_ratio": _FLOAT,
    "ellipsis_ratio": _FLOAT,
    "bullet_lines": _FLOAT,
    "ellipsis_lines": _FLOAT,
    "alpha_words": _FLOAT,
    "stop_words": _INT,
    "punctuated_lines": _FLOAT,
    "short_lines": _FLOAT,
    "newline_ratio": _FLOAT,
    "javascript_lines": _FLOAT,
    "policy_lines": _FLOAT,
    "lorem_ipsum": _INT,
    "braces": _INT,
    "urls": _INT,
    "digit_ratio": _FLOAT,
    "upper_ratio": _FLOAT,
    "unique_words": _FLOAT,
    "compression_ratio": Signal("float64", "hone.text.signals.compression:compression_ratio"),
    "dup_lines": _FLOAT,
    "dup_line_chars": _FLOAT,
    "dup_paragraphs": _FLOAT,
    "dup_paragraph_chars": _FLOAT,
    **{f"top_{n}gram_chars": _FLOAT for n in (2, 3, 4)},
    **{f"dup_{n}gram_chars": _FLOAT for n in range(5, 11)},
    "mtld": _FLOAT,
    "flesch": _FLOAT,
    "non_alnum_ratio": _FLOAT,
    "whitespace_ratio": _FLOAT,
    "paren_ratio": _FLOAT,
    "url_ratio": _FLOAT,
    "number_words": _FLOAT,
    "upper_lines": _FLOAT,
    "boilerplate_words": _FLOAT,
    "c4_lines": _FLOAT,
    "c4_sentences": _INT,
    "c4_loose_sentences": _INT,
    "long_lines": _INT,
    "emails": _INT,
    "public_ips": _INT,
    "phones": _INT,
    "cards": _INT,
    "unspaced_words": _FLOAT,
    "language_stop_words": _INT,
}
"""Every signal. One with a function of its own is that function and this line. Ratios are per word or per character, fractions are of lines, words or characters; 0 where the
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


def column_kinds() -> dict[str, str]:
    """'text' or 'number' for each column that every document has; scorers add more."""
    kinds = DOCUMENT | {name: signal.kind for name, signal in SIGNALS.items()}
    return {name: "text" if kind.endswith("string") else "number" for name, kind in kinds.items()}


def signals_of(texts: Texts, languages: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Every column of SIGNALS for each of `texts`, as an array [num_texts] of its kind.

    `languages` has the code of each text's language, whose stop words are counted; without it the English are.
    """
    try:
        columns = resolve("hone.text.signals.measure:signals_of")(texts, languages)
        for name, signal in SIGNALS.items():
            if signal.function:
                columns[name] = resolve(signal.function)(texts, columns)
    except ImportError as error:
        raise MissingExtra.of("measuring texts", error.name or "numba", "data") from None
    return {name: columns[name].astype(signal.kind, copy=False) for name, signal in SIGNALS.items()}


def signals(text: str, language: str = "") -> dict[str, float | int]:
    """The value of every column in SIGNALS for one document."""
    return {name: column[0].item() for name, column in signals_of(Texts.of([text]), [language]).items()}
