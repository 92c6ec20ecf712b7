"""Statistics of languages, from which the limits of rules follow that count words: languages.json, read once.

The method is that of FineWeb2 (Penedo et al. 2025, arXiv:2506.20920): every limit that was chosen on English is moved to where
the language's own text has it. Source of the statistics: 1000 sentences of each language (Leipzig Corpora, CC BY 4.0), by
`python -m benchmarks.data.languages DATA`, which says how each is computed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

UNSPACED = "unspaced"
"""The entry for text in scripts without spaces between words and a language that has no entry: the loosest of those it has."""


_MEMBERS = {"msa": ("id", "ms"), "hbs": ("bs", "hr", "sr"), "nor": ("nb", "nn")}
"""Macrolanguages, which an identifier may name instead of their members."""


class Language(NamedTuple):
    """Statistics of one language, relative to English.

    `unspaced`: words are characters or clusters (units.py); `words` of a sentence and `chars` of a word; `marked`, the share of sentences that end with a mark; `grams`, by how much larger
    than in English the share of characters in the most frequent 2-, 3- and 4-grams, and in repeated 5- to 10-grams is;
    `stop_words`, in lower case.
    """

    unspaced: bool
    words: float
    chars: float
    marked: float
    grams: tuple[float, ...]
    stop_words: tuple[str, ...]


@functools.cache
def languages() -> dict[str, Language]:
    """{code: statistics} of all languages in the file."""
    rows = json.loads((Path(__file__).parent / "languages.json").read_text(encoding="utf8"))["languages"]
    lists = {
        code: {**row, "grams": tuple(row["grams"]), "stop_words": tuple(row["stop_words"])}
        for code, row in rows.items()
    }
    own = {code: Language(**row) for code, row in lists.items()}
    return own | {code: _joined([own[one] for one in members]) for code, members in _MEMBERS.items()}


def _joined(members: list[Language]) -> Language:
    """Statistics of text in any of `members`: the mean of words and characters, the loosest of the rest, the stop words of all."""
    words, chars = ([getattr(one, name) for one in members] for name in ("words", "chars"))
    return Language(
        unspaced=False,
        words=sum(words) / len(words),
        chars=sum(chars) / len(chars),
        marked=min(one.marked for one in members),
        grams=tuple(map(max, *(one.grams for one in members))),
        stop_words=tuple(dict.fromkeys(word for one in members for word in one.stop_words)),
    )
