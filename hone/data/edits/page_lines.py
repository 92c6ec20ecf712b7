"""Edits of C4 and RefinedWeb: cut lines that are no sentences, headings in capitals, counters and notices out of web pages."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.edits.base import SPACED_LINES, ByShard, Spans
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


class RefinedWebLines(ByShard):
    """Cuts the lines that RefinedWeb corrects. Penedo et al. 2023, arXiv:2306.01116, appendix G.2.

    In this order: lines mostly in upper case, of digits alone, with a counter alone ('3 likes', '1.2K views'), of one word.
    Out of other lines of up to ten words 'sign-in' at the beginning, 'read more...' at the end and 'items in cart' anywhere
    are cut. The paper then drops pages in which more than 5 % of the words were flagged, which is a rule of the filter `refinedweb`;
    use one or both. DCLM (arXiv:2406.11794) has the same rules.
    """

    paper: ClassVar[str] = "arXiv:2306.01116"
    unit: ClassVar[str] = "lines"
    max_uppercase_ratio: float = Field(0.5, ge=0, le=1, description="Largest share of capitals in a line's characters.")
    max_numeric_ratio: float = Field(
        0.999999, gt=0, description="A line with this share of digits or more is cut; above 1: none."
    )
    counters: bool = Field(True, description="Cut lines that are a count of likes, shares, views and so on.")
    one_word: bool = Field(True, description="Cut lines of one word.")
    max_edited_words: int = Field(10, ge=0, description="Most words of a line out of which phrases are cut.")
    min_left_bytes: int = Field(100, ge=0, description="A document of which fewer bytes are left is dropped.")
    when: str = Field(SPACED_LINES, description="Expression that selects the documents to edit.")

    @property
    def rule_names(self) -> tuple[str, ...]:
        return ("uppercase", "numeric", "counter", "one_word", "phrase")

    def find(self, texts: Texts) -> Spans:
        kernels = compiled("hone.text.edits.boilerplate")
        found = kernels.refinedweb_cuts(
            *texts,
            self.max_uppercase_ratio,
            self.max_numeric_ratio,
            self.counters,
            self.one_word,
            self.max_edited_words,
            kernels.upper(),
            kernels.numeric(),
        )
        return Spans(*found)
