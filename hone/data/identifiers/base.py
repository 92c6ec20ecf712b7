"""The base of the identifiers of languages, and what is common to those that answer text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from hone.base.table import Technique
from hone.text.batch import Texts
from hone.text.langid.shipped import UNKNOWN

_SHORTER = {
    "afr": "af", "ara": "ar", "arb": "ar", "aze": "az", "azj": "az", "bel": "be", "bul": "bg", "ben": "bn", "bos": "bs", "cat": "ca",
    "ces": "cs", "cym": "cy", "dan": "da", "deu": "de", "ell": "el", "eng": "en", "epo": "eo", "spa": "es", "est": "et", "ekk": "et",
    "eus": "eu", "fas": "fa", "pes": "fa", "fin": "fi", "fra": "fr", "gle": "ga", "guj": "gu", "heb": "he", "hin": "hi", "hrv": "hr",
    "hun": "hu", "hye": "hy", "ind": "id", "isl": "is", "ita": "it", "jpn": "ja", "kat": "ka", "kaz": "kk", "kor": "ko", "lat": "la",
    "lug": "lg", "lit": "lt", "lav": "lv", "lvs": "lv", "mri": "mi", "mkd": "mk", "mon": "mn", "khk": "mn", "mar": "mr", "msa": "ms",
    "zsm": "ms", "nob": "nb", "nld": "nl", "nno": "nn", "pan": "pa", "pol": "pl", "por": "pt", "ron": "ro", "rus": "ru", "slk": "sk",
    "slv": "sl", "sna": "sn", "som": "so", "sqi": "sq", "als": "sq", "srp": "sr", "sot": "st", "swa": "sw", "swh": "sw", "swe": "sv",
    "tam": "ta", "tel": "te", "tha": "th", "tgl": "tl", "fil": "tl", "tsn": "tn", "tur": "tr", "tso": "ts", "ukr": "uk", "urd": "ur",
    "vie": "vi", "xho": "xh", "yor": "yo", "zho": "zh", "cmn": "zh", "zul": "zu", "lao": "lo", "khm": "km", "mya": "my", "bod": "bo",
    "no": "nb", "iw": "he", "jw": "jv", "un": UNKNOWN, "und": UNKNOWN,
}  # fmt: skip
"""ISO 639-1 codes of the languages that hone has limits for, by ISO 639-3 and by older codes."""


class Opened(Protocol):
    """What an identifier is once its model is in memory."""

    def identify_all(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """(codes object [n], UNKNOWN where no language is identified; scores float64 [n], 0 there) of a batch."""
        ...


class LanguageIdentification(Technique):
    """A technique that names the language of texts."""

    def files(self) -> dict[str, Path]:
        """Files of its model, whose content is part of the artifact's identity."""
        return {}

    def check(self, languages: Sequence[str]) -> None:
        """Raises SpecError for languages (ISO 639) that it cannot name."""

    def open(self, languages: tuple[str, ...]) -> Opened:
        """With its model in memory; texts in other languages than `languages` (empty: all) are unknown.

        Raises MissingExtra without its package, SpecError for a file that is no model.
        """
        raise NotImplementedError


class OneByOne:
    """An identifier that is asked text by text: `name(text)` is (code, score). Processes that get one open it again."""

    def __init__(
        self, technique: LanguageIdentification, languages: tuple[str, ...], name: Callable[[str], tuple[str, float]]
    ) -> None:
        self._technique, self.languages, self._name = technique, languages, name

    def __reduce__(self) -> tuple:
        return (type(self._technique).open, (self._technique, self.languages))

    def identify_all(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """See `Opened`."""
        found = [self._one(text) for text in texts.strings()]
        codes = np.array([code for code, _ in found] or [""], object)[: len(found)]
        return codes, np.array([score for _, score in found], np.float64)

    def _one(self, text: str) -> tuple[str, float]:
        if not any(map(str.isalpha, text[:4096])):
            return UNKNOWN, 0.0
        code, score = self._name(text)
        return (UNKNOWN, 0.0) if code == UNKNOWN or (self.languages and code not in self.languages) else (code, score)


@cache
def code_of(label: str) -> str:
    """hone's code of a label such as en, eng_Latn, zh-Hant or __label__por: ISO 639-1 where hone's tables have it, else as it is."""
    bare = label.removeprefix("__label__").replace("_", "-").partition("-")[0].lower()
    return _SHORTER.get(bare, bare)


def may_be_known(code: str) -> bool:
    """Whether `code` may be a language of another identifier than hone's own: ISO 639-3, and not a longer form of one of hone's."""
    return len(code) == 3 and code.isalpha() and code.islower() and code_of(code) == code
