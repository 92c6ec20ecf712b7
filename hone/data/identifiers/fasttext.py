"""Supervised models of fastText whose labels are languages."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.data.identifiers.base import LanguageIdentification, OneByOne, code_of
from hone.text.langid.shipped import UNKNOWN


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
