"""Gopher's repetition rules: whether the text repeats itself."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import LanguageFilter, Rule
from hone.text.signals.languages import languages


class GopherRepetition(LanguageFilter):
    """Drops text that repeats lines, paragraphs or word n-grams. Rae et al. 2021, arXiv:2112.11446, appendix A.1.

    Characters in repeated 5- to 10-grams are those of their union, with the spaces inside; datatrove skips over a repeat
    and leaves the spaces out. Equal decisions on all of 763 natural English texts.
    """

    paper: ClassVar[str] = "arXiv:2112.11446"
    max_dup_lines: float = Field(0.30, description="Largest fraction of lines seen before in the document.")
    max_dup_line_chars: float = Field(0.20, description="Largest fraction of characters in such lines.")
    max_dup_paragraphs: float = Field(0.30, description="Largest fraction of paragraphs seen before.")
    max_dup_paragraph_chars: float = Field(0.20, description="Largest fraction of characters in such paragraphs.")
    max_top_ngram_chars: tuple[float, float, float] = Field(
        (0.20, 0.18, 0.16), description="Largest fraction of characters in the most frequent 2-, 3- and 4-gram."
    )
    max_dup_ngram_chars: tuple[float, float, float, float, float, float] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        description="Largest fraction of characters in 5- to 10-grams seen before.",
    )

    def rules(self) -> list[Rule]:
        return [
            Rule("duplicate_lines", f"dup_lines <= {self.max_dup_lines}"),
            Rule("duplicate_paragraphs", f"dup_paragraphs <= {self.max_dup_paragraphs}"),
            Rule("duplicate_line_chars", f"dup_line_chars <= {self.max_dup_line_chars}"),
            Rule("duplicate_paragraph_chars", f"dup_paragraph_chars <= {self.max_dup_paragraph_chars}"),
            *(
                Rule(f"top_{n}gram", f"top_{n}gram_chars <= {limit}", self._grams("max_top_ngram_chars", n, limit))
                for n, limit in zip((2, 3, 4), self.max_top_ngram_chars)
            ),
            *(
                Rule(
                    f"duplicate_{n}grams",
                    f"dup_{n}gram_chars <= {limit}",
                    self._grams("max_dup_ngram_chars", n, limit),
                )
                for n, limit in zip(range(5, 11), self.max_dup_ngram_chars)
            ),
        ]

    def _grams(self, field: str, n: int, limit: float) -> dict[str, float] | None:
        """The limits of other languages: what any text of theirs repeats is added.

        Where words are single characters or clusters, ten of them are about as long as five English words, and have
        their limit; runs of five to nine have none.
        """
        if not self.own(field, getattr(self, field)):
            return None
        limits = {}
        for code, own in languages().items():
            limits[code] = limit + own.grams[n - 2]
            if own.unspaced and n >= 5:
                limits[code] = self.max_dup_ngram_chars[0] + own.grams[n - 2] if n == 10 else 1.0
        return limits
