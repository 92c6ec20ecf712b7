"""FineWeb's own rules for web pages: short, repeated, unpunctuated lines and lists."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import LanguageFilter, Rule


class FineWeb(LanguageFilter):
    """Drops pages made of short, unpunctuated or repeated lines. Penedo et al. 2024, arXiv:2406.17557."""

    paper: ClassVar[str] = "arXiv:2406.17557"
    min_punctuated_lines: float = Field(0.12, description="Least fraction of lines that end with terminal punctuation.")
    max_short_lines: float = Field(0.67, description="Largest fraction of lines of 30 characters or fewer.")
    max_dup_line_chars: float = Field(0.01, description="Largest fraction of characters in lines seen before.")
    max_newline_ratio: float = Field(0.3, description="Most line breaks per word.")

    def rules(self) -> list[Rule]:
        return [
            self.moved(
                "unpunctuated_lines",
                "punctuated_lines",
                ">=",
                "min_punctuated_lines",
                lambda limit, own: limit * own.marked,
            ),
            Rule("short_lines", f"short_lines <= {self.max_short_lines}"),
            Rule("duplicate_line_chars", f"dup_line_chars <= {self.max_dup_line_chars}"),
            self.moved("list_like", "newline_ratio", "<=", "max_newline_ratio", lambda limit, own: limit / own.words),
        ]
