"""Language identification as two columns: the code and the identifier's confidence.

The identifier is hone's own (hone/text/langid). It knows 75 languages and returns "unknown" for everything else: text
with no letters or few of them (tables, program text), too short to tell, in a script that none of the languages uses,
with more than half of its letters in other scripts, or unlike the texts of the language it comes closest to.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hone.base.errors import MissingExtra, SpecError, nearest
from hone.text.batch import Texts
from hone.text.langid.shipped import shipped_languages

if TYPE_CHECKING:
    from hone.text.langid.model import Model

NO_LANGUAGE = "code"
"""Value of the language column for program text."""
UNKNOWN = "unknown"
"""Value of the language column when no language is identified; its score is 0."""


MACROLANGUAGES = {
    "id": "msa", "ms": "msa", "bs": "hbs", "hr": "hbs", "sr": "hbs", "nb": "nor", "nn": "nor",
}  # fmt: skip
"""ISO 639-3 codes of the macrolanguages of languages that short texts hardly tell apart."""
_MEANT = {
    "jp": "ja", "cn": "zh", "kr": "ko", "gr": "el", "cz": "cs", "dk": "da", "se": "sv", "ua": "uk", "vn": "vi", "no": "nb", "iw": "he",
    "in": "id", "ger": "de", "deu": "de", "fre": "fr", "fra": "fr", "spa": "es", "jpn": "ja", "chi": "zh", "zho": "zh", "kor": "ko",
    "por": "pt", "dut": "nl", "nld": "nl", "cze": "cs", "gre": "el", "ell": "el", "pol": "pl", "swe": "sv",
}  # fmt: skip
"""Languages that are probably meant by country codes and three-letter codes."""


def need_known(languages: Sequence[str], known: Sequence[str] = ()) -> None:
    """Raises SpecError with suggestions unless all of `languages` are `known` (default: those of the package's model)."""
    known = known or shipped_languages()
    unknown = sorted(set(languages) - set(known))
    if unknown:
        meant = {code: _meant(code, known) or MACROLANGUAGES.get(code) for code in unknown}
        hint = ", ".join(f"'{near}' for '{code}'" for code, near in meant.items() if near)
        raise SpecError(
            f"unknown languages {', '.join(unknown)}",
            fix=f"{f'did you mean {hint}? ' if hint else ''}choose among: {', '.join(known)}",
        )


def _meant(code: str, known: Sequence[str]) -> str | None:
    bare = code.lower().replace("_", "-").partition("-")[0]
    near = [bare, _MEANT.get(bare, ""), nearest(bare, known)]
    return next((one for one in near if one in known), None)


def answers(languages: Sequence[str]) -> tuple[str, ...]:
    """The codes that `languages` have where macrolanguages are not split, sorted."""
    return tuple(sorted({MACROLANGUAGES.get(code, code) for code in languages}))


class Identifier:
    """Identifies the language of texts among `candidates` (ISO 639 codes; empty: all languages of the model).

    Probabilities are over all languages of the model: a text whose likeliest language is no candidate is unknown.
    Other texts of other languages are mostly unknown too, always when no candidate is written in their script.
    With `macrolanguages` the languages of MACROLANGUAGES answer with its codes, with the sum of their probabilities.
    Raises MissingExtra without numba, SpecError for an unknown language.
    """

    def __init__(self, candidates: Sequence[str] = (), macrolanguages: bool = False) -> None:
        try:
            from hone.text.langid.model import Model
        except ImportError as error:
            if error.name != "numba":
                raise
            raise MissingExtra.of("identifying languages", "numba", "data") from None
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
        need_known(candidates, known)
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
        from hone.text.langid.kernels import frozen, identify

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
