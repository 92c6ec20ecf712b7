"""FineWeb's own rules for web pages: short, repeated, unpunctuated lines and lists."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import SPACED_PROSE, Filter, Rule


class FineWeb(Filter):
    """Drops pages made of short, unpunctuated or repeated lines. Penedo et al. 2024, arXiv:2406.17557."""

    paper: ClassVar[str] = "arXiv:2406.17557"
    when: str = Field(SPACED_PROSE, description="Expression that selects the documents the rules apply to.")
    min_punctuated_lines: float = Field(0.12, description="Least fraction of lines that end with terminal punctuation.")
    max_short_lines: float = Field(0.67, description="Largest fraction of lines of 30 characters or fewer.")
    max_dup_line_chars: float = Field(0.01, description="Largest fraction of characters in lines seen before.")
    max_newline_ratio: float = Field(0.3, description="Most line breaks per word.")

    def rules(self) -> list[Rule]:
        return [
            Rule("unpunctuated_lines", f"punctuated_lines >= {self.min_punctuated_lines}"),
            Rule("short_lines", f"short_lines <= {self.max_short_lines}"),
            Rule("duplicate_line_chars", f"dup_line_chars <= {self.max_dup_line_chars}"),
            Rule("list_like", f"newline_ratio <= {self.max_newline_ratio}"),
        ]
