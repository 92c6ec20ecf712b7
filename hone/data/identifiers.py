"""Identifiers of languages: hone's own model, Compact Language Detector 2, and models of fastText."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError, nearest
from hone.base.lazy import resolve
from hone.base.table import Technique
from hone.text.batch import Texts
from hone.text.langid.shipped import MACROLANGUAGES, UNKNOWN, answers, shipped_languages

if TYPE_CHECKING:
    from hone.text.langid.identify import Identifier

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


class Own(LanguageIdentification):
    """Naive Bayes over n-grams of bytes by script, with lanes that reject other languages (docs/languages.md). 75 languages."""

    paper: ClassVar[str] = "https://aclanthology.org/P12-3005/"

    macrolanguages: bool = Field(
        False,
        description="Name id and ms msa, bs, hr and sr hbs, nb and nn nor: pairs that short texts hardly tell apart.",
    )

    def check(self, languages: Sequence[str]) -> None:
        joined = sorted(set(languages) & set(MACROLANGUAGES.values()))
        if joined and not self.macrolanguages:
            raise SpecError(
                f"the identifier does not name {', '.join(joined)}",
                fix="set identifier.macrolanguages: true, or name the languages themselves",
            )
        need_known(languages, answers(shipped_languages()) if self.macrolanguages else ())

    def open(self, languages: tuple[str, ...]) -> Identifier:
        need_known(languages, answers(shipped_languages()) if self.macrolanguages else ())
        MissingExtra.need("identifying languages", "numba", "data")
        return resolve("hone.text.langid.identify:Identifier")(languages, self.macrolanguages)


class CLD2(LanguageIdentification):
    """Chrome's detector of 83 languages, by quadgrams (Sites 2013), through the package pycld2.

    A text that it calls unreliable is unknown; the score is the share of the text in its first language.
    """

    paper: ClassVar[str] = "https://github.com/CLD2Owners/cld2"

    def open(self, languages: tuple[str, ...]) -> OneByOne:
        try:
            import pycld2
        except ImportError:
            raise MissingExtra.of("identifying languages with cld2", "pycld2", "langid") from None

        def name(text: str) -> tuple[str, float]:
            # It refuses control characters and code points that Unicode has not given out.
            clean = "".join(character for character in text if character.isprintable() or character == "\n")
            reliable, _, details = pycld2.detect(clean.encode("utf8", "ignore"), bestEffort=False)
            _, label, percent, _ = details[0]
            return (code_of(label), percent / 100) if reliable else (UNKNOWN, 0.0)

        return OneByOne(self, languages, name)


class FastText(LanguageIdentification):
    """A fastText model in a file: lid.176.bin or .ftz, GlotLID, OpenLID. Joulin et al. 2017, arXiv:1607.01759.

    Labels may be ISO 639-1, ISO 639-3 or with a script (eng_Latn); scripts are left out.
    """

    paper: ClassVar[str] = "arXiv:1607.01759"

    path: Path = Field(description="The model: a file of fastText, .bin or .ftz.")
    min_score: float = Field(0.3, ge=0, le=1, description="A text whose best label has less probability is unknown.")

    def files(self) -> dict[str, Path]:
        return {"identifier.path": self.path.expanduser()}

    def open(self, languages: tuple[str, ...]) -> OneByOne:
        try:
            import fasttext
        except ImportError:
            raise MissingExtra.of("identifying languages with fastText", "fasttext", "langid") from None
        file = self.path.expanduser()
        if not file.is_file():
            raise SpecError(
                f"identifier.path {self.path}: there is no such file",
                fix="give a model of fastText, such as lid.176.ftz",
            )
        try:
            model = fasttext.load_model(str(file))
        except ValueError as error:
            raise SpecError(
                f"identifier.path {self.path} is no model of fastText: {error}",
                fix="give a .bin or .ftz file with labels",
            ) from None

        def name(text: str) -> tuple[str, float]:
            labels, scores = model.predict(" ".join(text.split("\n")), k=1)
            if not labels or scores[0] < self.min_score:
                return UNKNOWN, 0.0
            return code_of(labels[0]), min(1.0, float(scores[0]))  # it returns a little more than 1

        return OneByOne(self, languages, name)
