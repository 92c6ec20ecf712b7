"""Rules for any document: its length and language, personal data, listed words, and the user's own expression."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.data.filters.base import Filter, Rule
from hone.data.identifiers import may_be_known, need_known
from hone.text.langid.shipped import MACROLANGUAGES, UNKNOWN


class Length(Filter):
    """Keeps documents within bounds of bytes and longest line, code too."""

    when: str = Field("True", description="Expression that selects the documents the rules apply to.")
    min_bytes: int = Field(100, description="Fewest UTF-8 bytes.")
    max_bytes: int = Field(10_000_000, description="Most UTF-8 bytes.")
    max_line_chars: int = Field(100_000, description="Longest line in characters; longer ones are data, not text.")

    def rules(self) -> list[Rule]:
        return [
            Rule("too_short", f"bytes >= {self.min_bytes}"),
            Rule("too_long", f"bytes <= {self.max_bytes}"),
            Rule("long_line", f"max_line_chars <= {self.max_line_chars}"),
        ]


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


class PII(Filter):
    """Drops documents with many e-mail or IP addresses, telephone or card numbers. Soldaini et al. 2024, arXiv:2402.00159.

    Such a page is a directory or a leak; five matches are Dolma's limit.
    Each match is checked: the shape of e-mail addresses (RFC 5321), IANA's special IPv4 ranges, E.164 or North American
    grouping of telephone numbers, Luhn's check digit of card numbers. Matches in kept documents stay unless the edit `mask` replaces them.
    """

    paper: ClassVar[str] = "arXiv:2402.00159"
    max_hits: int = Field(5, ge=0, description="Most matches of all kinds together.")
    max_cards: int = Field(0, ge=0, description="Most card numbers.")

    def rules(self) -> list[Rule]:
        return [
            Rule("personal_data", f"emails + public_ips + phones + cards <= {self.max_hits}"),
            Rule("card_numbers", f"cards <= {self.max_cards}"),
        ]


class Toxicity(Filter):
    """Drops documents with words of the lexicon; at 0 with any, as C4 does. Raffel et al. 2019, arXiv:1910.10683.

    The scorer `lexicon` adds the column, from files that the user gives; the package has none. A list of words ignores context: C4's removed
    pages about health, in dialects and by minorities far more often than others (Dodge et al. 2021,
    arXiv:2104.08758). Documents without the measurement are kept. Check the samples, and each group's drop rate, before keeping the limit at 0.
    """

    paper: ClassVar[str] = "arXiv:1910.10683"
    max_toxic_words: float = Field(0.0, ge=0, le=1, description="Most words or phrases of the lexicon, per word.")

    def rules(self) -> list[Rule]:
        return [Rule("toxic_words", f"not toxic_words > {self.max_toxic_words}")]

    def check(self, columns: Collection[str]) -> None:
        if "toxic_words" not in columns:
            raise SpecError(
                "the filter toxicity needs the column toxic_words, which a lexicon adds",
                fix="add it to the scorers: {kind: lexicon, words: [words.txt]}",
            )


class Custom(Filter):
    """Keeps the documents for which `keep` holds, for example "compression_ratio <= 4 and urls < 10"."""

    keep: str = Field("True", description="Expression over signal columns that a document must meet.")
    reason: str = Field("", description="Name of the rule in statistics and samples; none: the text of `keep`.")

    @property
    def label(self) -> str:
        """Its name in reports, with `reason`, since there may be several of this kind."""
        return f"'{self.kind}' ({f'{self.reason}: ' if self.reason else ''}{self.keep})"

    def rules(self) -> list[Rule]:
        return [Rule(self.reason or self.keep, self.keep)]
