"""The base of filters: rules over signal columns, each with the reason that it gives for dropping a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field, field_validator

from hone.base.figure import Estimate
from hone.base.table import Technique
from hone.data.expression import columns_of, evaluate, need_sense
from hone.data.signals import DOCUMENT, SIGNALS

COLUMN_KINDS = {name: "text" if kind.endswith("string") else "number" for name, kind in {**DOCUMENT, **SIGNALS}.items()}
"""Kind of each column that every document has; scorers add more."""
SPACED_PROSE = "kind != 'code' and language not in ('zh', 'ja', 'th', 'lo', 'km', 'my')"
"""Where rules that count words apply: prose in languages with spaces between words."""


class Rule(NamedTuple):
    """A document that does not meet `keep` is dropped, with `reason`."""

    reason: str
    keep: str


class Filter(Technique):
    """A list of rules with thresholds as fields. It reads columns only, never text, so deciding again is cheap."""

    when: str = Field(
        "kind != 'code'", description="Expression that selects the documents the rules apply to; 'True' for all."
    )

    @field_validator("when", "keep", check_fields=False)  # `keep` is a field of some filters only
    @classmethod
    def _makes_sense(cls, value: str) -> str:
        need_sense(value, COLUMN_KINDS)
        return value

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"'{self.kind}'"

    def rules(self) -> list[Rule]:
        """The rules in order; the reason is that of the first rule not met."""
        raise NotImplementedError

    @property
    def columns(self) -> set[str]:
        """Names of the columns that its rules use."""
        return columns_of(self.when).union(*(columns_of(rule.keep) for rule in self.rules()))

    def decide(self, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(keep bool [n], reason object [n]) for `columns` of n documents; the reason is '' for a kept document.

        Raises SpecError when a rule names a column that does not exist.
        """
        applies = evaluate(self.when, columns)
        reasons = np.full(len(applies), "", object)
        for rule in self.rules():
            fails = applies & (reasons == "") & ~evaluate(rule.keep, columns)
            reasons[fails] = rule.reason
        return reasons == "", reasons

    def estimates(self, columns: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
        """Fraction of bytes it will keep, from the columns of a sample of documents."""
        keep, _ = self.decide(columns)
        total = columns["bytes"].sum()
        share = float(columns["bytes"][keep].sum() / total) if total else 1.0
        return {
            "kept_fraction": Estimate(
                value=share, unit="1", formula=f"share of bytes kept of {len(keep)} sampled documents"
            )
        }
