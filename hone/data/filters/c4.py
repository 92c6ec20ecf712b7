"""C4's rules for web pages, as decisions about whole documents."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import Filter, Rule


class C4(Filter):
    """Drops placeholder text, pages with braces and pages of few sentences. Raffel et al. 2019, arXiv:1910.10683, section 2.2.

    C4 also deletes single lines (no terminal punctuation, 'javascript', policy notices). A filter here decides about
    documents and never rewrites them, so those become limits on the fraction of such lines.
    """

    paper: ClassVar[str] = "arXiv:1910.10683"
    min_sentences: int = Field(5, description="Fewest sentences.")
    max_word_chars: int = Field(1000, description="Longest word in characters.")
    max_javascript_lines: float = Field(0.1, description="Largest fraction of lines that mention javascript.")
    max_policy_lines: float = Field(0.1, description="Largest fraction of lines with a cookie or terms-of-use phrase.")
    braces: bool = Field(False, description="Keep documents with a '{'.")

    def rules(self) -> list[Rule]:
        return [
            Rule("lorem_ipsum", "lorem_ipsum == 0"),
            *([] if self.braces else [Rule("brace", "braces == 0")]),
            Rule("too_few_sentences", f"sentences >= {self.min_sentences}"),
            Rule("long_word", f"max_word_chars <= {self.max_word_chars}"),
            Rule("javascript", f"javascript_lines <= {self.max_javascript_lines}"),
            Rule("policy", f"policy_lines <= {self.max_policy_lines}"),
        ]
