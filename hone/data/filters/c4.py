"""C4's rules for web pages, as decisions about whole documents."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import SPACED_PROSE, Filter, Rule


class C4(Filter):
    """Drops placeholder text, pages with braces and pages of few sentences. Raffel et al. 2019, arXiv:1910.10683, section 2.2.

    C4 also deletes lines: of fewer than three words, without punctuation at the end, with a word of over 1000 characters,
    with 'javascript' or a policy notice. A filter here drops documents and never rewrites them, so sentences count only
    in lines that C4 would keep, and the last three become limits on the document. FineWeb runs these rules with
    `punctuated_lines: false`; mC4 requires three lines of 200 characters instead: `min_long_lines: 3`.
    """

    paper: ClassVar[str] = "arXiv:1910.10683"
    when: str = Field(SPACED_PROSE, description="Expression that selects the documents the rules apply to.")
    min_sentences: int = Field(5, description="Fewest sentences in the lines that C4 keeps.")
    punctuated_lines: bool = Field(True, description="Keep only lines that end with punctuation, as C4 does.")
    min_long_lines: int = Field(0, ge=0, description="Fewest lines of 200 characters or more; 0: any number.")
    max_word_chars: int = Field(1000, description="Longest word in characters.")
    max_javascript_lines: float = Field(0.1, description="Largest fraction of lines that mention javascript.")
    max_policy_lines: float = Field(0.1, description="Largest fraction of lines with a cookie or terms-of-use phrase.")
    braces: bool = Field(False, description="Keep documents with a '{'.")

    def rules(self) -> list[Rule]:
        sentences = "c4_sentences" if self.punctuated_lines else "c4_loose_sentences"
        return [
            Rule("lorem_ipsum", "lorem_ipsum == 0"),
            *([] if self.braces else [Rule("brace", "braces == 0")]),
            Rule("long_word", f"max_word_chars <= {self.max_word_chars}"),
            Rule("javascript", f"javascript_lines <= {self.max_javascript_lines}"),
            Rule("policy", f"policy_lines <= {self.max_policy_lines}"),
            Rule("too_few_sentences", f"{sentences} >= {self.min_sentences}"),
            *([Rule("too_few_long_lines", f"long_lines >= {self.min_long_lines}")] if self.min_long_lines else []),
        ]
