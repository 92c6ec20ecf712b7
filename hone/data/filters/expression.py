"""The user's own filter: any expression over the signal columns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hone.data.expression import parse
from hone.data.filters.base import Filter, Rule


class Custom(Filter):
    """Keeps the documents for which `keep` holds, for example "compression_ratio <= 4 and urls < 10"."""

    keep: str = Field("True", description="Expression over signal columns that a document must meet.")
    reason: str = Field("own_rule", description="Name of the rule in statistics and samples.")

    def model_post_init(self, context: Any) -> None:
        parse(self.keep)
        parse(self.when)

    def rules(self) -> list[Rule]:
        return [Rule(self.reason, self.keep)]
