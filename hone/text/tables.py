"""Tables that let kernels treat UTF-8 as Unicode: white space, classes of code points, lower case, words to find."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np

ALPHABETIC, ALPHANUMERIC, UPPER_CASE, EDGE, CLOSER, TERMINAL, BULLET, FULL_STOP = (1 << bit for bit in range(8))
"""Bits of `classes`: str.isalpha, str.isalnum and str.isupper of a character, and the marks below."""
SPACE_BYTES = ((9, 13), (28, 32))
"""The white bytes of ASCII, as ranges."""
LEAD_BYTES = ((0xC2, 0xC2), (0xE1, 0xE3))
"""First bytes of possible multi-byte spaces, as ranges."""
EDGE_PUNCTUATION = ".,;:!?\"'()[]{}<>*`"
"""Characters stripped from both ends of a word to get its bare form."""
CLOSERS = "\"')]”’"
"""Marks allowed between the end of a sentence and the space after it."""
TERMINAL_MARKS = ".!?‼⁇⁈⁉։؟۔।॥။።፧។៕᠃᠉。．｡！？﹒﹖﹗"
"""Sentence-ending marks of Unicode, in the most common scripts; FineWeb's line rule requires one, quotes are not enough."""
BULLETS = "•-●*‣◦"
FULL_STOPS = "".join(mark for mark in TERMINAL_MARKS if not mark.isascii())
"""Marks that end a sentence in any position."""
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
COUNTED_THINGS = (
    "likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes", "downloads",
    "views", "followers",
)  # fmt: skip

STARTS, ENDS, EQUALS, CONTAINS, BARE = range(5)
"""How a pattern matches a lower-cased word; BARE: equals it without the punctuation around."""
FLAGS = (
    *(f"stop_{word}" for word in STOP_WORDS), "bullet", "ellipsis", "terminal", "c4_terminal", "javascript", "lorem",
    "ipsum", "terms", "of", "use_first", "privacy", "policy", "cookie", "uses", "cookies", "use_last", "thing",
    "quantity", "sign_in", "read", "more", "items", "in", "cart", "toxic_first", "letter", "filled",
    "wide", "ends", "stop_any",
)  # fmt: skip
"""Names of the bits of a word's flags, the lowest first."""
_PATTERNS = (
    *((word, BARE, f"stop_{word}") for word in STOP_WORDS),
    *((word, BARE, "thing") for word in COUNTED_THINGS),
    ("javascript", CONTAINS, "javascript"),
    ("lorem", ENDS, "lorem"),
    ("ipsum", STARTS, "ipsum"),
    ("terms", ENDS, "terms"),
    ("of", EQUALS, "of"),
    ("use", STARTS, "use_first"),
    ("use", ENDS, "use_last"),
    ("uses", ENDS, "uses"),
    ("privacy", ENDS, "privacy"),
    ("policy", STARTS, "policy"),
    ("cookie", ENDS, "cookie"),
    ("cookies", STARTS, "cookies"),
    ("sign-in", STARTS, "sign_in"),
    ("read", BARE, "read"),
    ("more...", EQUALS, "more"),
    ("more…", EQUALS, "more"),
    ("items", BARE, "items"),
    ("in", EQUALS, "in"),
    ("cart", BARE, "cart"),
)


def flag(name: str) -> int:
    """The bit of `name` in FLAGS."""
    return 1 << FLAGS.index(name)


@functools.cache
def spaces() -> np.ndarray:
    """int64 [29]: the code points that separate words, as in str.split."""
    return np.array([code for code in range(0x3001) if chr(code).isspace()], np.int64)


@functools.cache
def classes() -> np.ndarray:
    """uint8 [n]: the classes of every code point below n; all others have none."""
    codes = [*range(0x34000), *range(0xE0000, 0xE0200)]
    table = np.zeros(codes[-1] + 1, np.uint8)
    for code in codes:
        char = chr(code)
        if char.isalnum():
            table[code] = ALPHANUMERIC | (ALPHABETIC if char.isalpha() else 0)
        if char.isupper():
            table[code] |= UPPER_CASE
    marks = (
        (EDGE_PUNCTUATION, EDGE),
        (CLOSERS, CLOSER),
        (TERMINAL_MARKS, TERMINAL),
        (BULLETS, BULLET),
        (FULL_STOPS, FULL_STOP),
    )
    for chars, bit in marks:
        for char in chars:
            table[ord(char)] |= bit
    return table[: int(np.flatnonzero(table)[-1]) + 1]


@functools.cache
def lower_case() -> np.ndarray:
    """int32 [n]: the lower-case form of every code point below n, one for one; all others are their own.

    The dotted capital I, the only one whose full lower case has two code points, becomes a plain i, and sigma is never final.
    """
    table = np.arange(0x20000, dtype=np.int32)
    for code in range(len(table)):
        if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) in ("Lu", "Lt", "Nl", "So"):
            table[code] = ord(chr(code).lower()[0])
    return table[: int(np.flatnonzero(table != np.arange(len(table)))[-1]) + 1]


@functools.cache
def patterns() -> tuple[np.ndarray, ...]:
    """The words to find: code points int32 concatenated, offsets int64 [k + 1], mode, bit, letters and size int64 [k].

    Letters are a set of code points modulo 64, as bits: a word that lacks one of them cannot match.
    Size is the number of characters a word must have, with or without the punctuation around; 0: any number.
    """
    texts = [[ord(char) for char in text] for text, _, _ in _PATTERNS]
    codes = np.array([code for text in texts for code in text], np.int32)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    modes = np.array([mode for _, mode, _ in _PATTERNS], np.int64)
    bits = np.array([flag(name) for _, _, name in _PATTERNS], np.int64)
    letters = np.array([sum(1 << code for code in {code % 64 for code in text}) for text in texts], np.uint64)
    sizes = np.where((modes == EQUALS) | (modes == BARE), np.diff(offsets), 0)
    return codes, offsets, modes, bits, letters, sizes
