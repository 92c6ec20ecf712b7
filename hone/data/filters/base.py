"""The base of filters: rules over signal columns, each with the reason that it gives for dropping a document."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.data.expression import columns_of, evaluate, files_of, need_sense
from hone.data.signals import column_kinds
from hone.text.signals.languages import UNSPACED, Language, languages


class Rule(NamedTuple):
    """A document that does not meet `keep` is dropped, with `reason`.

    With `limits`, `keep` is a column, <= or >=, and a number; documents of a language in `limits` are held to its number instead, those
    of other languages without spaces between words to that of UNSPACED, and those of other languages to that of "" if it is there.
    """

    reason: str
    keep: str
    limits: Mapping[str, float] | None = None

    @property
    def said(self) -> str:
        """`keep` for reports."""
        return f"{self.keep}, by language" if self.limits else self.keep

    def holds(self, columns: Mapping[str, np.ndarray], places: np.ndarray | None = None) -> np.ndarray:
        """Which documents meet it (bool [n]); `places` is `language_places(columns)`."""
        if self.limits is None:
            return evaluate(self.keep, columns)
        name, sign, number = self.keep.split()
        codes = list(languages())
        numbers = [self.limits.get(code, float(number)) for code in codes] + [self.limits.get("", float(number))]
        limit = np.array(numbers)[language_places(columns) if places is None else places]
        need_columns((name,), columns, self.keep)
        return columns[name] <= limit if sign == "<=" else columns[name] >= limit


def language_places(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """For each document the number of its entry in `languages()`; their count for a language without entry.

    Raises SpecError for documents that were measured without `unspaced_words`.
    """
    codes = list(languages())
    need_columns(("language", "unspaced_words"), columns, "limits by language")
    order = np.argsort(codes)
    ordered = np.array(codes)[order]
    said = np.asarray(columns["language"]).astype(str)
    found = np.minimum(np.searchsorted(ordered, said), len(codes) - 1)
    places = np.where(ordered[found] == said, order[found], len(codes))
    other = (places == len(codes)) & (columns["unspaced_words"] > 0.5)
    places[other] = codes.index(UNSPACED)
    return places


def need_columns(names: Iterable[str], columns: Mapping[str, np.ndarray], what: str) -> None:
    """Raises SpecError where one of `names` is not among `columns`."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise SpecError(
            f"{what}: these documents have no column {', '.join(missing)}",
            fix="read them again with this version, or set per_language: false in the filter",
        )


class Filter(Technique):
    """A list of rules with thresholds as fields. It reads columns only, never text, so deciding again is cheap."""

    when: str = Field(
        "kind != 'code'", description="Expression that selects the documents the rules apply to; 'True' for all."
    )

    @field_validator("when", "keep", check_fields=False)  # `keep` is a field of some filters only
    @classmethod
    def _makes_sense(cls, value: str) -> str:
        need_sense(value, column_kinds())
        return value

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"'{self.kind}'"

    def rules(self) -> list[Rule]:
        """The rules in order; the reason is that of the first rule not met."""
        raise NotImplementedError

    def check(self, columns: Collection[str]) -> None:
        """Raises SpecError, with the way out, where it knows what would add a column that is not among `columns`."""

    @property
    def columns(self) -> set[str]:
        """Names of the columns that its rules use."""
        rules = self.rules()
        own = {"language", "unspaced_words"} if any(rule.limits for rule in rules) else set()
        return columns_of(self.when).union(own, *(columns_of(rule.keep) for rule in rules))

    @property
    def files(self) -> tuple[str, ...]:
        """The list files that its rules read."""
        texts = [self.when, *(rule.keep for rule in self.rules())]
        return tuple(dict.fromkeys(name for text in texts for name in files_of(text)))

    def decide(
        self, columns: Mapping[str, np.ndarray], places: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(keep bool [n], reason object [n]) for `columns` of n documents; the reason is '' for a kept document.

        `places` is `language_places(columns)`, computed where it is needed. Raises SpecError when a rule names a column
        that does not exist.
        """
        self.check(columns)
        applies, rules = evaluate(self.when, columns), self.rules()
        if places is None and any(rule.limits for rule in rules):
            places = language_places(columns)
        reasons = np.full(len(applies), "", object)
        for rule in rules:
            fails = applies & (reasons == "") & ~rule.holds(columns, places)
            reasons[fails] = rule.reason
        return reasons == "", reasons


class LanguageFilter(Filter):
    """A filter whose limits were chosen on English and have counterparts in other languages."""

    per_language: bool = Field(
        True,
        description="A limit that counts words and is at its default is, in other languages than English, moved to where their own "
        "text has it (hone/text/signals/languages.json). A limit with another value holds for every language; with false, all do.",
    )

    def own(self, field: str, value: float | tuple[float, ...]) -> bool:
        """Whether the limit `field`, which has `value`, is moved by language."""
        return self.per_language and value == type(self).model_fields[field].default

    def moved(self, reason: str, column: str, sign: str, field: str, move: Callable[[float, Language], float]) -> Rule:
        """The rule `column sign limit`; `move` gives the limit of a language from that of English."""
        limit = getattr(self, field)
        limits = {code: move(limit, one) for code, one in languages().items()} if self.own(field, limit) else None
        return Rule(reason, f"{column} {sign} {limit:g}", limits)
