"""RefinedWeb's line corrections: cuts headings in capitals, counters, one-word lines and sign-in phrases out of web pages."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.edits.by_shard import SPACED_LINES, ByShard, Spans
from hone.data.edits.cuts import compiled
from hone.text.batch import Texts


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
