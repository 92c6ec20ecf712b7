"""The user's own filter: any expression over the signal columns."""

from __future__ import annotations

from pydantic import Field

from hone.data.filters.base import Filter, Rule


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
