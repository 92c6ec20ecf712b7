"""Allocation of the KV cache's pages: fixed-size pages, shared by reference count and found again by content.

Kwon et al. 2023 (PagedAttention, arXiv:2309.06180). `PagePool` only counts; `hone.serve.paging.cache` holds the tensors. A full
page has a key: a hash chained over all tokens up to its end. A freed page keeps its key until it is allocated again, so
the prefix cache needs no extra memory; which of them is allocated first is the technique of the slot `eviction`.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hone.base.errors import FitError
from hone.serve.eviction.eviction import Eviction, FreeOrder, PageUse
from hone.serve.eviction.lru import LRU
from hone.serve.request import Retention
from hone.serve.step import NULL_PAGE


def root_key(salt: str) -> bytes:
    """The key before the first page: prompts with different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def page_key(parent: bytes, content: bytes) -> bytes:
    """The key of a full page with `content` (`_bytes` of its tokens) after the page with key `parent`: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(parent + content, digest_size=16).digest()


def chain_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """The keys of all full pages of `tokens`."""
    keys, parent = [], root_key(salt)
    for content in _page_contents(tokens, block_size, len(tokens)):
        parent = page_key(parent, content)
        keys.append(parent)
    return keys


def _page_contents(tokens: Sequence[int], block_size: int, end: int) -> Iterator[bytes]:
    """The content of every full page of the first `end` tokens."""
    whole, step = _bytes(tokens), _ITEM_BYTES * block_size
    return (whole[start : start + step] for start in range(0, end // block_size * step, step))


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


_ITEM_BYTES = array("q").itemsize


@dataclass(frozen=True)
class _Content:
    """The content of a page with a key (its tokens as int64); compared on a hit, so that a hash collision never returns a wrong page."""

    key: bytes
    parent: bytes
    tokens: bytes


class PagePool:
    """The state of every page: used (its count is above 0), cached (free, found by content) or blank.

    `eviction` orders the cached ones; `clock` (s) is what durations are measured with.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction: Eviction | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_pages < 1:
            raise FitError(f"a KV cache of {num_pages} pages is empty", fix="raise engine.num_pages")
        self.num_pages = num_pages
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._counts = [0] * (num_pages + 1)
        self._contents: list[_Content | None] = [None] * (num_pages + 1)
        self._uses = [PageUse() for _ in range(num_pages + 1)]
        self._by_key: dict[bytes, int] = {}
        self._continued: dict[bytes, int] = {}
        """By key: pages in the prefix cache that continue the page of that key."""
        self._blank = list(range(num_pages, 0, -1))
        self._cached = FreeOrder(eviction or LRU(), clock)
        self._events = 0  # pages that entered the prefix cache or were freed, so far

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
                page = self._cached.pop()
                self._forget(page)
            assert self._counts[page] == 0, f"page {page} was free and in use"
            self._counts[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int], salt: str = "", keys: Sequence[bytes] = ()) -> list[int]:
        """The longest run of cached pages that hold a proper prefix of `tokens`; increments the count of each.

        At least one token always remains, because the model needs a token to compute logits from. `keys`: `chain_keys` of
        the tokens, where they are known.
        """
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        parent = root_key(salt)
        for index, content in enumerate(_page_contents(tokens, self.block_size, len(tokens) - 1)):
            key = keys[index] if keys else page_key(parent, content)
            page = self._by_key.get(key)
            if page is None or not self._holds(page, parent, content):
                break
            pages.append(page)
            parent = key
        for page in pages:
            if self._counts[page] == 0:
                self._cached.discard(page)
            self._counts[page] += 1
        return pages

    def _holds(self, page: int, parent: bytes, tokens: bytes) -> bool:
        held = self._contents[page]
        return held is not None and held.tokens == tokens and held.parent == parent

    def count_hits(self, pages: Sequence[int]) -> None:
        """A sequence was admitted with these matched pages (a match alone may be undone for lack of other pages)."""
        for page in pages:
            self._uses[page].hits += 1

    def retain(self, pages: Sequence[int], retention: Sequence[Retention]) -> None:
        """Gives the pages of a sequence, in its order, the priorities of the token ranges that touch them.

        Where several touch a page the highest priority counts. Pages outside every range keep theirs.
        """
        for index, page in enumerate(pages if retention else ()):
            begin, end = index * self.block_size, (index + 1) * self.block_size
            asked = [one for one in retention if one.start < end and (one.end is None or one.end > begin)]
            if asked:
                best = max(asked, key=lambda one: one.priority)
                self._uses[page].priority, self._uses[page].duration_s = best.priority, best.duration_s

    def is_private(self, page: int) -> bool:
        """Whether a page has one user and is not in the prefix cache: it may be overwritten."""
        return self._counts[page] == 1 and self._contents[page] is None

    def claim(self, pages: Sequence[int], count: int) -> list[int]:
        """Up to `count` of a sequence's `pages` that nobody else uses, made private: the prefix cache loses what it had there."""
        alone = [page for page in pages if self._counts[page] == 1][:count]
        self.forget(alone)
        return alone

    def num_known(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are in the prefix cache without a gap."""
        return next((index for index, key in enumerate(keys) if key not in self._by_key), len(keys))

    def key_of(self, page: int) -> bytes:
        """The key under which a matched page is found."""
        content = self._contents[page]
        assert content is not None, f"page {page} has no key"
        return content.key

    def publish(self, page: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Enters the full, computed `page` in the prefix cache; returns its key, the parent of the next page's."""
        assert len(tokens) == self.block_size, f"a page of {len(tokens)} tokens is not full"
        assert self._counts[page] > 0, f"page {page} is published while it is free"
        content = _bytes(tokens)
        key = page_key(parent, content)
        if self.enable_prefix_caching and key not in self._by_key and self._contents[page] is None:
            self._by_key[key] = page
            self._contents[page] = _Content(key, parent, content)
            self._events += 1
            self._uses[page] = PageUse(published=self._events)
            self._continued[parent] = self._continued.get(parent, 0) + 1
            self._update_need(parent)
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
            content = self._contents[page]
            if content is not None:
                self._events += 1
                self._uses[page].freed = self._events
                self._cached.free(page, self._uses[page], content.key in self._continued)
            else:
                self._blank.append(page)
                gone.append(page)
        return gone

    def forget(self, pages: Sequence[int]) -> None:
        """Removes `pages` with wrong content from the prefix cache; sequences that use them keep them."""
        for page in pages:
            if self._contents[page] is None:
                continue
            if self._counts[page] == 0:
                self._cached.discard(page)
                self._blank.append(page)
            self._forget(page)

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
        parents = [content.parent for content in self._contents if content is not None]
        assert sum(self._continued.values()) == len(parents), "a page's continuations are miscounted"
        assert all(self._continued[parent] == parents.count(parent) for parent in set(parents)), "or of another page"

    def _forget(self, page: int) -> None:
        content = self._contents[page]
        if content is not None:
            del self._by_key[content.key]
            self._contents[page] = None
            self._continued[content.parent] -= 1
            if self._continued[content.parent] == 0:
                del self._continued[content.parent]
                self._update_need(content.parent)

    def _update_need(self, key: bytes) -> None:
        """Tells the order of free pages whether others continue the page of `key`, after a change."""
        page = self._by_key.get(key)
        if page is not None and page in self._cached:
            self._cached.need(page, key in self._continued)
