"""Gopher's rules: whether a text looks like prose, and whether it repeats itself."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import LanguageFilter, Rule
from hone.text.signals.languages import UNSPACED, languages


class GopherQuality(LanguageFilter):
    """Keeps text with the counts of prose: words, symbols, bullets, stop words. Rae et al. 2021, arXiv:2112.11446, appendix A.1.

    Words are separated by white space; characters or clusters in scripts without spaces (hone/text/units.py). datatrove counts spaCy's tokens, so each full stop is a word without a letter and
    the rule on letters is stricter than the paper's: on 763 natural English texts 93.4 % of the decisions are equal, and 49
    of the 50 others are texts that only this rule of datatrove drops. The last one differs because datatrove counts
    blank lines.
    """

    paper: ClassVar[str] = "arXiv:2112.11446"
    min_words: int = Field(50, description="Fewest words.")
    max_words: int = Field(100_000, description="Most words.")
    min_mean_word_chars: float = Field(3, description="Least mean word length.")
    max_mean_word_chars: float = Field(10, description="Largest mean word length.")
    max_hash_ratio: float = Field(0.1, description="Most '#' per word.")
    max_ellipsis_ratio: float = Field(0.1, description="Most ellipses per word.")
    max_bullet_lines: float = Field(0.9, description="Largest fraction of lines that begin with a bullet.")
    max_ellipsis_lines: float = Field(0.3, description="Largest fraction of lines that end with an ellipsis.")
    min_alpha_words: float = Field(0.8, description="Least fraction of words with a letter.")
    min_stop_words: int = Field(
        2,
        description="Fewest distinct words of: the be to of and that have with (English), or of the most frequent of another "
        "language. Languages without a list are not held to it.",
    )

    def rules(self) -> list[Rule]:
        return [
            self.moved("too_few_words", "words", ">=", "min_words", lambda limit, own: round(limit * own.words)),
            self.moved("too_many_words", "words", "<=", "max_words", lambda limit, own: round(limit * own.words)),
            self.moved(
                "short_words", "mean_word_chars", ">=", "min_mean_word_chars", lambda limit, own: limit * own.chars
            ),
            self._long_words(),
            self.moved("too_many_hashes", "hash_ratio", "<=", "max_hash_ratio", lambda limit, own: limit / own.words),
            self.moved(
                "too_many_ellipses", "ellipsis_ratio", "<=", "max_ellipsis_ratio", lambda limit, own: limit / own.words
            ),
            Rule("too_many_bullets", f"bullet_lines <= {self.max_bullet_lines}"),
            Rule("too_many_ellipsis_lines", f"ellipsis_lines <= {self.max_ellipsis_lines}"),
            Rule("too_few_alphabetic_words", f"alpha_words >= {self.min_alpha_words}"),
            self._stop_words(),
        ]

    def _long_words(self) -> Rule:
        """In a script of which no language is known words may be syllables, which are longer than characters."""
        rule = self.moved(
            "long_words", "mean_word_chars", "<=", "max_mean_word_chars", lambda limit, own: limit * own.chars
        )
        return rule._replace(limits={**rule.limits, UNSPACED: self.max_mean_word_chars}) if rule.limits else rule

    def _stop_words(self) -> Rule:
        if not self.per_language:
            return Rule("too_few_stop_words", f"stop_words >= {self.min_stop_words} or language != 'en'")
        limits = {code: self.min_stop_words if own.stop_words else 0 for code, own in languages().items()}
        return Rule("too_few_stop_words", f"language_stop_words >= {self.min_stop_words}", {**limits, "": 0})


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
