"""C4's rules for web pages, as decisions about whole documents."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import LanguageFilter, Rule


class C4(LanguageFilter):
    """Drops placeholder text, pages with braces and pages of few sentences. Raffel et al. 2019, arXiv:1910.10683, section 2.2.

    C4 also cuts lines: of fewer than three words, without punctuation at the end, with a word of over 1000 characters,
    with 'javascript' or a policy notice. That is the edit `c4_lines`; sentences count only in lines that it keeps. A page is
    not dropped for its notices unless the last three fields say so. FineWeb runs these rules with
    `punctuated_lines: false`. The marks of other scripts end sentences and lines too; Thai has none. mC4 requires three lines of 200 characters instead: `min_long_lines: 3`.
    """

    paper: ClassVar[str] = "arXiv:1910.10683"
    min_sentences: int = Field(5, description="Fewest sentences in the lines that C4 keeps.")
    punctuated_lines: bool = Field(True, description="Keep only lines that end with punctuation, as C4 does.")
    min_long_lines: int = Field(0, ge=0, description="Fewest lines of 200 characters or more; 0: any number.")
    max_word_chars: int | None = Field(None, description="Longest word in characters; none: any length.")
    max_javascript_lines: float | None = Field(
        None, ge=0, le=1, description="Largest fraction of lines that mention javascript; none: all."
    )
    max_policy_lines: float | None = Field(
        None, ge=0, le=1, description="Largest fraction of lines with a cookie or terms-of-use phrase; none: all."
    )
    braces: bool = Field(False, description="Keep documents with a '{'.")

    def rules(self) -> list[Rule]:
        sentences = "c4_sentences" if self.punctuated_lines else "c4_loose_sentences"
        return [
            Rule("lorem_ipsum", "lorem_ipsum == 0"),
            *([] if self.braces else [Rule("brace", "braces == 0")]),
            *self._notices(),
            self.moved(
                "too_few_sentences", sentences, ">=", "min_sentences", lambda limit, own: round(limit * own.marked)
            ),
            *([Rule("too_few_long_lines", f"long_lines >= {self.min_long_lines}")] if self.min_long_lines else []),
        ]

    def _notices(self) -> list[Rule]:
        """The rules that drop a page for lines which C4 only cuts."""
        limits = (
            ("long_word", "max_word_chars", self.max_word_chars),
            ("javascript", "javascript_lines", self.max_javascript_lines),
            ("policy", "policy_lines", self.max_policy_lines),
        )
        return [Rule(reason, f"{column} <= {most}") for reason, column, most in limits if most is not None]
