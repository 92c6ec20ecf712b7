"""Identify: the language of texts and how sure that is, by hone's own identifier.

It knows 75 languages and returns "unknown" for everything else: text with no letters or few of them (tables, program text), too short to tell, in
a script that none of the languages uses, with more than half of its letters in other scripts, or unlike the texts of the language it comes closest to.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

from hone.text.batch import Texts
from hone.text.langid.kernels import frozen, identify
from hone.text.langid.model import Model
from hone.text.langid.shipped import MACROLANGUAGES, UNKNOWN, answers


class Identifier:
    """Identifies the language of texts among `candidates` (ISO 639 codes; empty: all languages of the model).

    Probabilities are over all languages of the model: a text whose likeliest language is no candidate is unknown.
    Other texts of other languages are mostly unknown too, always when no candidate is written in their script.
    With `macrolanguages` the languages of MACROLANGUAGES answer with its codes, with the sum of their probabilities.
    Raises ValueError for an unknown language.
    """

    def __init__(self, candidates: Sequence[str] = (), macrolanguages: bool = False) -> None:
        self._use(Model.load(), candidates, macrolanguages)
        self._made_by = (Identifier, (self.languages, macrolanguages))

    @classmethod
    def of(cls, model: Model, candidates: Sequence[str] = (), macrolanguages: bool = False) -> Identifier:
        """One with another model, trained by hone.text.langid.train."""
        identifier = cls.__new__(cls)
        identifier._use(model, candidates, macrolanguages)
        identifier._made_by = (cls.of, (model, identifier.languages, macrolanguages))
        return identifier

    def __reduce__(self) -> tuple:
        # Other processes read the package's model themselves, so that a few bytes are sent instead of megabytes.
        return self._made_by

    def _use(self, model: Model, candidates: Sequence[str], macrolanguages: bool) -> None:
        merged = MACROLANGUAGES if macrolanguages else {}
        known = answers(model.languages) if macrolanguages else model.languages
        unknown = sorted(set(candidates) - set(known))
        if unknown:
            raise ValueError(f"unknown languages {', '.join(unknown)}")
        self.languages = tuple(sorted(set(candidates))) or known
        """The candidates, sorted."""
        self._tables = model.tables(frozenset(self.languages), merged)
        self._codes = model.codes(UNKNOWN, merged)

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639 code or UNKNOWN, probability) of one text."""
        raw = np.frombuffer(text.encode("utf8", "replace"), np.uint8)
        codes, scores = self.identify_all(Texts(raw, np.array([0, len(raw)], np.int64)))
        return str(codes[0]), float(scores[0])

    def identify_all(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """(codes object [n], probabilities float64 [n]) of a batch.

        Texts of up to 4 KiB are read whole, longer ones in eight windows of 512 bytes from the first to the last.
        """
        scripts, lanes, scores = identify(*frozen(_composed(texts)), self._tables)
        return self._codes[scripts, lanes], scores


def _composed(texts: Texts) -> Texts:
    """`texts` with those in NFC that hold combining accents or single jamo, because the model counted composed letters."""
    first, last = int(texts.offsets[0]), int(texts.offsets[-1])
    data = texts.data[first:last]
    accents = np.flatnonzero((data & 0xFE) == 0xCC)  # lead bytes of U+0300 to U+037F
    jamo = np.flatnonzero(data[:-1] == 0xE1)
    jamo = jamo[(data[jamo + 1] & 0xFC) == 0x84]  # U+1100 to U+11FF
    if not len(accents) and not len(jamo):
        return texts
    marked = np.concatenate([accents, jamo]) + first
    places = set(np.unique(np.searchsorted(texts.offsets, marked, "right") - 1).tolist())
    parts = [data[start - first : end - first].tobytes() for start, end in zip(texts.offsets[:-1], texts.offsets[1:])]
    for i in places:
        parts[i] = unicodedata.normalize("NFC", parts[i].decode("utf8", "replace")).encode()
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Texts(np.frombuffer(b"".join(parts), np.uint8), offsets)
