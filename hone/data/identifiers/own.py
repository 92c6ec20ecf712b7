"""hone's own identifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import MissingExtra, SpecError, nearest
from hone.base.lazy import resolve
from hone.data.identifiers.base import LanguageIdentification
from hone.text.langid.shipped import MACROLANGUAGES, answers, shipped_languages

if TYPE_CHECKING:
    from hone.text.langid.identify import Identifier

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
        try:
            return resolve("hone.text.langid.identify:Identifier")(languages, self.macrolanguages)
        except ImportError as error:
            if error.name != "numba":
                raise
            raise MissingExtra.of("identifying languages", "numba", "data") from None
