"""Rules for web pages: those of C4, FineWeb and RefinedWeb, and block lists of addresses."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import Filter, LanguageFilter, Rule
from hone.data.filters.gopher import GopherQuality, GopherRepetition


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


class FineWeb(LanguageFilter):
    """Drops pages made of short, unpunctuated or repeated lines. Penedo et al. 2024, arXiv:2406.17557."""

    paper: ClassVar[str] = "arXiv:2406.17557"
    min_punctuated_lines: float = Field(0.12, description="Least fraction of lines that end with terminal punctuation.")
    max_short_lines: float = Field(0.67, description="Largest fraction of lines of 30 characters or fewer.")
    max_dup_line_chars: float = Field(0.01, description="Largest fraction of characters in lines seen before.")
    max_newline_ratio: float = Field(0.3, description="Most line breaks per word.")

    def rules(self) -> list[Rule]:
        return [
            self.moved(
                "unpunctuated_lines",
                "punctuated_lines",
                ">=",
                "min_punctuated_lines",
                lambda limit, own: limit * own.marked,
            ),
            Rule("short_lines", f"short_lines <= {self.max_short_lines}"),
            Rule("duplicate_line_chars", f"dup_line_chars <= {self.max_dup_line_chars}"),
            self.moved("list_like", "newline_ratio", "<=", "max_newline_ratio", lambda limit, own: limit / own.words),
        ]


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


class URL(Filter):
    """Drops documents by their URL: listed domains and pages, and words in the address. Penedo et al. 2023, arXiv:2306.01116, G.1.

    A domain of a list, such as the `domains` files of the University of Toulouse (UT1), also covers those below it, a page those
    below it. Of words, one hard word is enough, and one subword (in the letters and digits of the address alone, also inside of a word);
    soft words count only together. Lists are files of one entry a line; the words may also be given here. Fields are named as in
    datatrove. No list comes with hone. Documents without a URL pass.
    """

    paper: ClassVar[str] = "arXiv:2306.01116"
    when: str = Field("True", description="Expression that selects the documents the rules apply to.")
    domains: tuple[str, ...] = Field((), description="Files of blocked domains.")
    urls: tuple[str, ...] = Field((), description="Files of blocked pages: host and path.")
    banned_words: tuple[str, ...] = Field((), description="Words of which one drops a document; or file:PATH.")
    banned_subwords: tuple[str, ...] = Field((), description="Strings of which one anywhere drops it; or file:PATH.")
    soft_banned_words: tuple[str, ...] = Field((), description="Words of which several drop it; or file:PATH.")
    soft_word_threshold: int = Field(2, ge=1, description="Different soft words that drop a document.")

    def rules(self) -> list[Rule]:
        rules = [Rule("domain", f"domain(url) not in file({name!r})") for name in self.domains]
        rules += [Rule("url", f"page(url) not in file({name!r})") for name in self.urls]
        if self.banned_words:
            rules.append(Rule("hard_word", f"words_in(url, {_told(self.banned_words)}) == 0"))
        if self.banned_subwords:
            rules.append(Rule("subword", f"subwords_in(url, {_told(self.banned_subwords)}) == 0"))
        if self.soft_banned_words:
            most = self.soft_word_threshold
            rules.append(Rule("soft_words", f"words_in(url, {_told(self.soft_banned_words)}) < {most}"))
        return rules


def _told(words: tuple[str, ...]) -> str:
    """The arguments of an expression: words, and files of them."""
    return ", ".join(
        f"file({word.removeprefix('file:')!r})" if word.startswith("file:") else repr(word.lower()) for word in words
    )
