"""Toxicity lexicon: drops documents with too large a share of words of a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.filters.base import Filter, Rule


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

    def decide(
        self, columns: Mapping[str, np.ndarray], places: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As every filter; raises SpecError when the documents have no lexicon column."""
        if "toxic_words" not in columns:
            raise SpecError(
                "the filter toxicity needs the column toxic_words, which a lexicon adds",
                fix="add it to the scorers: {kind: lexicon, words: [words.txt]}",
            )
        return super().decide(columns, places)
