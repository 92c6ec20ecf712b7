"""Block lists of domains, pages and words in addresses."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import Filter, Rule


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
