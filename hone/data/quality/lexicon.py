"""Lexicon: how often the words and phrases of the user's lists occur in a document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.durable import input_file, write_atomic
from hone.base.errors import ArtifactError, SpecError
from hone.data.quality.base import Scorer
from hone.text.batch import Texts

_SCRIPTS = (
    "\u3041-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff", "\u0e01-\u0e7f", "\u0e80-\u0eff", "\u1780-\u17ff", "\u1000-\u109f",
)  # fmt: skip
"""Scripts without spaces between words: Chinese and Japanese, Thai, Lao, Khmer, Burmese."""
_UNSPACED = re.compile(f"[{''.join(_SCRIPTS)}]")


class Lexicon(Scorer):
    """Counts the words at which an entry of the lists begins, per word; the filter `toxicity` uses it.

    An entry is a word or a phrase. Case and the punctuation around words are ignored; words are separated by white space. Entries
    in scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are found anywhere in a text, from two characters
    on, also inside longer words, and every such character or cluster is a word (hone/text/units.py). Texts mostly in such a script have no value (NaN)
    when no entry is in that script: they were not measured. The package has no list. Costs a second pass over the text.
    """

    column: str = Field("toxic_words", description="Name of the column.")
    words: tuple[str, ...] = Field((), description="Files of entries: UTF-8, one per line, '#' begins a comment.")

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.words, str) or not all(self.words):
            raise ValueError("words must be a list of file names")

    def train(self, folder: Path) -> dict[str, float]:
        """Writes the entries to <column>.txt of `folder`. Raises SpecError when a file cannot be read or none has an entry."""
        entries: set[str] = set()
        for name in self.words:
            entries |= read_entries(input_file(name, "the lexicon"))
        if not entries:
            raise SpecError("the lexicon has no file", fix="name one: {kind: lexicon, words: [words.txt]}")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{self.column}.txt", "\n".join(sorted(entries)).encode())
        return {"entries": float(len(entries))}

    def open(self, folder: Path) -> _Opened:
        """The entries in `folder`."""
        path = folder / f"{self.column}.txt"
        try:
            return _Opened(self.column, tuple(path.read_text(encoding="utf8").split("\n")))
        except OSError as error:
            raise ArtifactError(f"the lexicon {path} cannot be read: {error}", fix="train the scorer again") from None


class _Opened(NamedTuple):
    column: str
    entries: tuple[str, ...]

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        """Hits per word, float64 [num_texts]; NaN for texts mostly in a script without spaces that has no entry."""
        from hone.text.signals import measure

        unspaced = [entry.lower() for entry in self.entries if _UNSPACED.search(entry)]
        counts, _ = measure.counts_of(texts, [entry for entry in self.entries if not _UNSPACED.search(entry)])
        found = measure.columns_of(counts)
        values, words = found["toxic_words"], np.maximum(found["words"], 1)
        longest = sorted((entry for entry in unspaced if len(entry) > 1), key=lambda entry: (-len(entry), entry))
        pattern = re.compile("|".join(map(re.escape, longest))) if longest else None
        has = [any(re.search(f"[{script}]", entry) for entry in unspaced) for script in _SCRIPTS]
        known, others = (
            re.compile(f"[{''.join(script for script, here in zip(_SCRIPTS, has) if here == wanted)}]")
            if wanted in has
            else None
            for wanted in (True, False)
        )
        for number, text in enumerate(texts.strings()):
            if text.isascii():
                continue
            alone = len(known.findall(text)) if known else 0
            if others and len(others.findall(text)) > len(text) / 2:
                values[number] = np.nan
            elif pattern is not None and alone:
                hits = values[number] * words[number] + len(pattern.findall(text.lower()))
                values[number] = hits / words[number]
        return {self.column: values}


def read_entries(path: Path) -> set[str]:
    """The words and phrases of one file. Raises SpecError when it cannot be read or has none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the lexicon {path} cannot be read: {error}", fix="name a UTF-8 file, one entry per line"
        ) from None
    entries = {line for line in lines if line and not line.startswith("#")}
    if not entries:
        raise SpecError(f"the lexicon {path} has no entry", fix="write one word or phrase per line")
    return entries
