"""Language filter: keeps documents in the wanted languages that are identified with enough confidence."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.data.filters.base import Filter, Rule
from hone.data.identifiers.base import may_be_known
from hone.data.identifiers.own import need_known
from hone.text.langid.shipped import MACROLANGUAGES, UNKNOWN


class Language(Filter):
    """Keeps documents in `languages`; 0.65 is FineWeb's threshold. Penedo et al. 2024, arXiv:2406.17557."""

    paper: ClassVar[str] = "arXiv:2406.17557"
    languages: tuple[str, ...] = Field(("en",), description="Wanted languages as ISO 639 codes.")
    min_score: float = Field(0.65, ge=0, le=1, description="Least confidence of the identifier.")
    keep_unknown: bool = Field(
        False,
        description="Keep documents whose language cannot be identified: tables, very short text, other languages.",
    )

    @field_validator("languages")
    @classmethod
    def _are_known(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        """Without this check, a code that the identifier never returns would silently drop all text of the intended language."""
        if UNKNOWN in languages:
            raise SpecError(
                f"language.languages names '{UNKNOWN}', which is not a language", fix="set keep_unknown: true"
            )
        of_others = {code for code in languages if may_be_known(code) or code in MACROLANGUAGES.values()}
        need_known([code for code in languages if code not in of_others])
        return languages

    def rules(self) -> list[Rule]:
        wanted = ", ".join(repr(language) for language in self.languages) or "''"
        confident = f"language_score >= {self.min_score}"
        if self.keep_unknown:
            return [
                Rule("other_language", f"language in ({wanted}, '{UNKNOWN}')"),
                Rule("language_uncertain", f"language == '{UNKNOWN}' or {confident}"),
            ]
        return [
            Rule("unknown_language", f"language != '{UNKNOWN}'"),
            Rule("other_language", f"language in ({wanted},)"),
            Rule("language_uncertain", confident),
        ]
