"""Allocation of the KV cache's pages: fixed-size pages, shared by reference count and found again by content.

Kwon et al. 2023 (PagedAttention, arXiv:2309.06180). `PagePool` only counts; `hone.serve.paging.cache` holds the tensors. A full
page has a key: a hash chained over all tokens up to its end. A freed page keeps its key until it is allocated again, so
the prefix cache needs no extra memory; the page freed longest ago is allocated first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hone.base.errors import FitError
from hone.serve.step import NULL_PAGE


def root_key(salt: str) -> bytes:
    """The key before the first page: prompts with different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page of `tokens` after the page with key `parent`: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Content:
    """The content of a page with a key; compared on a hit, so that a hash collision never returns a wrong page."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PagePool:
    """The state of every page: used (its count is above 0), cached (free, found by content) or blank."""

    def __init__(self, num_pages: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_pages < 1:
            raise FitError(f"a KV cache of {num_pages} pages is empty", fix="raise engine.num_pages")
        self.num_pages = num_pages
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._counts = [0] * (num_pages + 1)
        self._contents: list[_Content | None] = [None] * (num_pages + 1)
        self._by_key: dict[bytes, int] = {}
        self._blank = list(range(num_pages, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # freed longest ago first

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages that can still be found by content."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` pages with count 1 and undefined content; None, without a change, when there are too few."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            assert self._counts[page] == 0, f"page {page} was free and in use"
            self._counts[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The longest run of cached pages that hold a proper prefix of `tokens`; increments the count of each.

        At least one token always remains, because the model needs a token to compute logits from.
        """
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        size = self.block_size
        parent = root_key(salt)
        for start in range(0, (len(tokens) - 1) // size * size, size):
            chunk = tuple(tokens[start : start + size])
            key = page_key(parent, chunk)
            page = self._by_key.get(key)
            if page is None or self._contents[page] != _Content(key, parent, chunk):
                break
            pages.append(page)
            parent = key
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1
        return pages

    def key_of(self, page: int) -> bytes:
        """The key under which a matched page is found."""
        content = self._contents[page]
        assert content is not None, f"page {page} has no key"
        return content.key

    def publish(self, page: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Enters the full, computed `page` in the prefix cache; returns its key, the parent of the next page's."""
        assert len(tokens) == self.block_size, f"a page of {len(tokens)} tokens is not full"
        assert self._counts[page] > 0, f"page {page} is published while it is free"
        key = page_key(parent, tokens)
        if self.enable_prefix_caching and key not in self._by_key and self._contents[page] is None:
            self._by_key[key] = page
            self._contents[page] = _Content(key, parent, tuple(tokens))
        return key

    def free(self, pages: Sequence[int]) -> list[int]:
        """Decrements the count of each page; returns those whose content is lost.

        The last page of a sequence is freed first, so that the beginning of a shared prefix is cached longest.
        """
        gone = []
        for page in reversed(pages):
            assert page != NULL_PAGE and self._counts[page] > 0, f"page {page} is freed twice"
            self._counts[page] -= 1
            if self._counts[page] > 0:
                continue
            if self._contents[page] is not None:
                self._cached[page] = None
            else:
                self._blank.append(page)
                gone.append(page)
        return gone

    def forget(self, pages: Sequence[int]) -> None:
        """Removes `pages` with wrong content from the prefix cache; sequences that use them keep them."""
        for page in pages:
            if self._contents[page] is None:
                continue
            self._forget(page)
            if self._counts[page] == 0:
                del self._cached[page]
                self._blank.append(page)

    def clear(self) -> None:
        """Removes every page from the prefix cache."""
        self.forget(list(range(1, self.num_pages + 1)))

    def check(self) -> None:
        """Asserts that every page is in exactly one state and that every key points to its page."""
        used = {page for page in range(1, self.num_pages + 1) if self._counts[page] > 0}
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a page is blank twice"
        assert not (used & blank or used & cached or blank & cached), "a page is in two states"
        assert len(used) + len(blank) + len(cached) == self.num_pages, "pages are lost"
        for key, page in self._by_key.items():
            content = self._contents[page]
            assert content is not None and content.key == key, f"page {page} lost its content"

    def _forget(self, page: int) -> None:
        content = self._contents[page]
        if content is not None:
            del self._by_key[content.key]
            self._contents[page] = None
