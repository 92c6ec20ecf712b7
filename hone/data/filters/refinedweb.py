"""RefinedWeb's rules, which DCLM reuses: Gopher's, and a limit on the words in boilerplate lines."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import LanguageFilter, Rule
from hone.data.filters.gopher_quality import GopherQuality
from hone.data.filters.gopher_repetition import GopherRepetition


class RefinedWeb(LanguageFilter):
    """Gopher's rules, and drops pages with too much boilerplate. Penedo et al. 2023, arXiv:2306.01116.

    DCLM uses the same set (Li et al. 2024, arXiv:2406.11794): Gopher's quality and repetition rules and RefinedWeb's rules
    about lines. Lines of one word, mostly in upper case or with a counter ("3 likes"), and "sign-in", "read more..."
    and "items in cart" on lines of up to ten words are boilerplate. The papers cut them out and drop pages that lose more
    than 5 % of their words; a filter cuts nothing, so it only drops the pages.
    """

    paper: ClassVar[str] = "arXiv:2306.01116"
    max_boilerplate_words: float = Field(0.05, ge=0, le=1, description="Largest fraction of words in boilerplate.")

    def rules(self) -> list[Rule]:
        return [
            *GopherRepetition(per_language=self.per_language).rules(),
            *GopherQuality(per_language=self.per_language).rules(),
            Rule("boilerplate", f"boilerplate_words <= {self.max_boilerplate_words}"),
        ]
