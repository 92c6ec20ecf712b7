"""hone's own identifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.data.identifiers.base import LanguageIdentification
from hone.data.language import MACROLANGUAGES, Identifier, answers, need_known
from hone.text.langid.shipped import shipped_languages


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
        return Identifier(languages, self.macrolanguages)
