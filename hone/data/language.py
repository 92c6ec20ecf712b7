"""Language identification as two columns: the code and the identifier's confidence.

The identifier is hone's own (hone/data/langid). It knows 75 languages and returns "unknown" for everything else: text
with no letters or few of them (tables, program text), too short to tell, in a script that none of the languages uses,
with more than half of its letters in other scripts, or unlike the texts of the language it comes closest to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hone.base.errors import MissingExtra, SpecError, nearest
from hone.data.text.batch import Texts

if TYPE_CHECKING:
    from hone.data.langid.model import Model

NO_LANGUAGE = "code"
"""Value of the language column for program text."""
UNKNOWN = "unknown"
"""Value of the language column when no language is identified; its score is 0."""


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
        meant = {code: _meant(code, known) for code in unknown}
        hint = ", ".join(f"'{near}' for '{code}'" for code, near in meant.items() if near)
        raise SpecError(
            f"unknown languages {', '.join(unknown)}",
            fix=f"{f'did you mean {hint}? ' if hint else ''}choose among: {', '.join(known)}",
        )


def _meant(code: str, known: Sequence[str]) -> str | None:
    bare = code.lower().replace("_", "-").partition("-")[0]
    near = [bare, _MEANT.get(bare, ""), nearest(bare, known)]
    return next((one for one in near if one in known), None)


@functools.cache
def shipped_languages() -> tuple[str, ...]:
    """The codes of the package's model, sorted, read from the first line of its file."""
    with open(Path(__file__).parent / "langid" / "languages.bin", "rb") as file:
        return tuple(sorted(code for script in json.loads(file.readline())["scripts"] for code in script["languages"]))


class Identifier:
    """Identifies the language of texts among `candidates` (ISO 639 codes; empty: all languages of the model).

    Texts of other languages are mostly identified as unknown, always when no candidate is written in their script.
    Raises MissingExtra without numba, SpecError for an unknown language.
    """

    def __init__(self, candidates: Sequence[str] = ()) -> None:
        try:
            from hone.data.langid.model import Model
        except ImportError as error:
            if error.name != "numba":
                raise
            raise MissingExtra.of("identifying languages", "numba", "data") from None
        self._use(Model.load(), candidates)
        self._made_by = (Identifier, (self.languages,))

    @classmethod
    def of(cls, model: Model, candidates: Sequence[str] = ()) -> Identifier:
        """One with another model, trained by hone.data.langid.train."""
        identifier = cls.__new__(cls)
        identifier._use(model, candidates)
        identifier._made_by = (cls.of, (model, identifier.languages))
        return identifier

    def __reduce__(self) -> tuple:
        # Other processes read the package's model themselves, so that a few bytes are sent instead of megabytes.
        return self._made_by

    def _use(self, model: Model, candidates: Sequence[str]) -> None:
        need_known(candidates, model.languages)
        self.languages = tuple(sorted(set(candidates))) or model.languages
        """The candidates, sorted."""
        self._tables = model.tables(frozenset(self.languages))
        self._codes = model.codes(UNKNOWN)

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639 code or UNKNOWN, probability) of one text."""
        raw = np.frombuffer(text.encode("utf8", "replace"), np.uint8)
        codes, scores = self.identify_all(Texts(raw, np.array([0, len(raw)], np.int64)))
        return str(codes[0]), float(scores[0])

    def identify_all(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """(codes object [n], probabilities float64 [n]) of a batch.

        Texts of up to 4 KiB are read whole, longer ones in eight windows of 512 bytes from the first to the last.
        """
        from hone.data.langid.kernels import frozen, identify

        scripts, lanes, scores = identify(*frozen(texts), self._tables)
        return self._codes[scripts, lanes], scores
