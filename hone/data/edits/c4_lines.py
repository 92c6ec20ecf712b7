"""C4's line rules: cuts lines that are no sentences, script warnings and policy notices out of web pages."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.edits.by_shard import SPACED_LINES, ByShard, Spans
from hone.data.edits.cuts import compiled
from hone.text.batch import Texts


class C4Lines(ByShard):
    """Cuts the lines that C4 removes from a page. Raffel et al. 2019, arXiv:1910.10683, section 2.2.

    In this order: lines with a word of over 1000 characters, without punctuation at the end (. ? ! \\" ', no ellipsis), of
    fewer than three words, with 'javascript', with a policy phrase ('terms of use', 'privacy policy', 'cookie policy',
    'uses cookies', 'use of cookies', 'use cookies'). Citation marks ([1], [edit], [citation needed]) are cut out of the lines
    that stay. C4's rules about pages are the filter `c4`, which counts sentences in these lines alone, so that both together
    are C4. FineWeb (arXiv:2406.17557) runs it with `filter_no_terminal_punct: false`. Fields are named as in datatrove.
    """

    paper: ClassVar[str] = "arXiv:1910.10683"
    unit: ClassVar[str] = "lines"
    filter_no_terminal_punct: bool = Field(True, description="Cut lines that do not end with punctuation.")
    min_words_per_line: int = Field(3, ge=0, description="Fewest words of a line; 0: any number.")
    max_word_length: int = Field(1000, ge=0, description="Longest word of a line in characters; 0: any length.")
    filter_javascript: bool = Field(True, description="Cut lines that mention javascript.")
    filter_policy: bool = Field(True, description="Cut lines with a cookie, privacy or terms-of-use phrase.")
    remove_citations: bool = Field(True, description="Cut citation marks such as [1] out of lines.")
    min_left_bytes: int = Field(100, ge=0, description="A document of which fewer bytes are left is dropped.")
    when: str = Field(SPACED_LINES, description="Expression that selects the documents to edit.")

    @property
    def rule_names(self) -> tuple[str, ...]:
        return ("long_word", "no_terminal_punct", "few_words", "javascript", "policy", "citation")

    def find(self, texts: Texts) -> Spans:
        kernels = compiled("hone.text.edits.boilerplate")
        found = kernels.c4_cuts(
            *texts,
            self.filter_no_terminal_punct,
            self.min_words_per_line,
            self.max_word_length,
            self.filter_javascript,
            self.filter_policy,
            self.remove_citations,
        )
        return Spans(*found)
