"""Length filter: drops documents that are too short or too long."""

from __future__ import annotations

from pydantic import Field

from hone.data.filters.base import Filter, Rule


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
