"""Normalize: the form in which a text is stored, and texts whose combining marks would take hours to bring into it."""

from __future__ import annotations

import itertools
import unicodedata

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
