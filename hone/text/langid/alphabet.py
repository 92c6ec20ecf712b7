"""The alphabet: whether each character is a letter, its script, and its lower case."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np

SCRIPTS = (
    "none", "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "gurmukhi", "gujarati", "tamil",
    "telugu", "thai", "georgian", "armenian", "hangul", "han", "other",
)  # fmt: skip
"""Scripts by number. Kana and Bopomofo count as han, since Japanese mixes them; "other" is every script not named."""
HAN = SCRIPTS.index("han")
OTHER = SCRIPTS.index("other")
MARK = len(SCRIPTS)
"""Pseudo-script of combining marks, which follow letters of any script."""
SCRIPT_SHIFT = 17
"""An entry of the table is the script's number above this bit and the code point of the lower case below it."""
NUM_CHARACTERS = 1 << SCRIPT_SHIFT
"""Code points in the table; those above it are rare Han and treated as no letter."""
_HAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "BOPOMOFO", "KATAKANA-HIRAGANA"})
_NO_LETTERS = frozenset(
    {"MASCULINE", "FEMININE", "MODIFIER", "FULLWIDTH", "HALFWIDTH", "MICRO", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT"}
)


@functools.cache
def alphabet() -> np.ndarray:
    """int32 [NUM_CHARACTERS], read-only: 0 for characters that are no letters, else script << SCRIPT_SHIFT | lower case."""
    numbers = {name.upper(): number for number, name in enumerate(SCRIPTS)}
    table = np.zeros(NUM_CHARACTERS, np.int32)
    for point in range(NUM_CHARACTERS):
        character = chr(point)
        if unicodedata.category(character)[0] not in "LM":
            continue
        name = unicodedata.name(character, "unnamed").split()[0]
        if name in _NO_LETTERS:
            continue
        if name == "COMBINING":
            script = MARK
        else:
            script = numbers["HAN"] if name in _HAN else numbers.get(name, OTHER)
        table[point] = script << SCRIPT_SHIFT | ord(character.lower()[0])
    table.flags.writeable = False
    return table
