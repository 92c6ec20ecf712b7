"""Gopher's quality rules: whether the text looks like prose."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import SPACED_PROSE, Filter, Rule


class GopherQuality(Filter):
    """Keeps text with the counts of prose: words, symbols, bullets, stop words. Rae et al. 2021, arXiv:2112.11446, appendix A.1.

    Words are separated by white space. datatrove counts spaCy's tokens, so each full stop is a word without a letter and
    the rule on letters is stricter than the paper's: on 763 natural English texts 93.4 % of the decisions are equal, and 49
    of the 50 others are texts that only this rule of datatrove drops. The last one differs because datatrove counts
    blank lines.
    """

    paper: ClassVar[str] = "arXiv:2112.11446"
    when: str = Field(SPACED_PROSE, description="Expression that selects the documents the rules apply to.")
    min_words: int = Field(50, description="Fewest words.")
    max_words: int = Field(100_000, description="Most words.")
    min_mean_word_chars: float = Field(3, description="Least mean word length.")
    max_mean_word_chars: float = Field(10, description="Largest mean word length.")
    max_hash_ratio: float = Field(0.1, description="Most '#' per word.")
    max_ellipsis_ratio: float = Field(0.1, description="Most ellipses per word.")
    max_bullet_lines: float = Field(0.9, description="Largest fraction of lines that begin with a bullet.")
    max_ellipsis_lines: float = Field(0.3, description="Largest fraction of lines that end with an ellipsis.")
    min_alpha_words: float = Field(0.8, description="Least fraction of words with a letter.")
    min_stop_words: int = Field(2, description="Fewest distinct words of: the be to of and that have with (English).")

    def rules(self) -> list[Rule]:
        return [
            Rule("too_few_words", f"words >= {self.min_words}"),
            Rule("too_many_words", f"words <= {self.max_words}"),
            Rule("short_words", f"mean_word_chars >= {self.min_mean_word_chars:g}"),
            Rule("long_words", f"mean_word_chars <= {self.max_mean_word_chars:g}"),
            Rule("too_many_hashes", f"hash_ratio <= {self.max_hash_ratio}"),
            Rule("too_many_ellipses", f"ellipsis_ratio <= {self.max_ellipsis_ratio}"),
            Rule("too_many_bullets", f"bullet_lines <= {self.max_bullet_lines}"),
            Rule("too_many_ellipsis_lines", f"ellipsis_lines <= {self.max_ellipsis_lines}"),
            Rule("too_few_alphabetic_words", f"alpha_words >= {self.min_alpha_words}"),
            Rule("too_few_stop_words", f"stop_words >= {self.min_stop_words} or language != 'en'"),
        ]
