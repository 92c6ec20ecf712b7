"""Compact Language Detector 2."""

from __future__ import annotations

from typing import ClassVar

from hone.base.errors import MissingExtra
from hone.data.identifiers.base import LanguageIdentification, OneByOne, code_of
from hone.text.langid.shipped import UNKNOWN


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
