"""The slot `eviction`: a key function over what is known of a cached page, and the order that the pool keeps by it."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from hone.base.table import Technique

DEFAULT_PRIORITY = 35
"""Priority of pages for which no request asked for another (0 to 100), as in TensorRT-LLM."""


@dataclass(slots=True)
class PageUse:
    """What is known of a page in the prefix cache. `published` and `freed` are counted up: the later, the larger."""

    published: int = 0
    """When it entered the cache."""
    freed: int = 0
    """When its last user freed it."""
    hits: int = 0
    """Sequences that were admitted with it, beside the one that computed it."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100, by the latest request that set one."""
    duration_s: float | None = None
    """Seconds for which the priority holds after the page is freed; None: for ever."""
    until: float = inf
    """Clock (s) at which the priority ends; set when the page is freed."""


class Eviction(Technique):
    """Base of the slot. Pages are given out by `key`, the lowest first; of equal keys the one freed longest ago."""

    reads_retention: ClassVar[bool] = False
    """Whether priorities and durations of requests change the order; only then the clock is read."""

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        """Constant while the page is free, but for the moment `changes_at`. `now` is the pool's clock in seconds."""
        raise NotImplementedError

    def changes_at(self, use: PageUse, now: float) -> float:
        """Clock at which the key will change although nothing happens to the page; infinity for never."""
        return inf


class FreeOrder:
    """The free pages of a prefix cache, in the order in which `eviction` gives them out.

    A page on which another cached page depends (its continuation) is given out after all that are the last of their
    prefix: without its beginning, a continuation is never found again. A heap: changes take O(log pages).
    """

    def __init__(self, eviction: Eviction, clock: Callable[[], float] = time.monotonic) -> None:
        self._eviction = eviction
        self._clock = clock
        self._timed = eviction.reads_retention
        self._heap: list[tuple[tuple[float, ...], int, int, int]] = []  # of pages that no other continues
        self._changes: list[tuple[float, int, int]] = []
        self._pages: dict[int, tuple[int, PageUse]] = {}  # version, use
        self._version = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def free(self, page: int, use: PageUse, needed: bool) -> None:
        """Adds a page that was just freed; `needed`: other cached pages continue it."""
        if self._timed:
            use.until = inf if use.duration_s is None else self._clock() + use.duration_s
        self._enter(page, use, needed)

    def need(self, page: int, needed: bool) -> None:
        """Whether other cached pages continue a free page has changed."""
        self._enter(page, self._pages[page][1], needed)

    def discard(self, page: int) -> None:
        """Removes a page that is used again or blank."""
        del self._pages[page]  # what the heaps hold of it is skipped later

    def pop(self) -> int:
        """Removes and returns the page to give out next."""
        now = self._clock() if self._timed else 0.0
        while self._changes and self._changes[0][0] <= now:
            _, version, page = heapq.heappop(self._changes)
            if self._is_current(page, version):
                self._enter(page, self._pages[page][1], False)
        while self._heap:
            *_, version, page = heapq.heappop(self._heap)
            if self._is_current(page, version):
                del self._pages[page]
                return page
        # All are continued by pages in use: their sequences computed the same beginning at the same time.
        page = min(self._pages, key=lambda one: self._rank(self._pages[one][1], now))
        del self._pages[page]
        return page

    def _rank(self, use: PageUse, now: float) -> tuple[tuple[float, ...], int]:
        return self._eviction.key(use, now), use.freed

    def _is_current(self, page: int, version: int) -> bool:
        known = self._pages.get(page)
        return known is not None and known[0] == version

    def _enter(self, page: int, use: PageUse, needed: bool) -> None:
        self._version = version = self._version + 1
        self._pages[page] = version, use
        if needed:
            return
        if len(self._heap) > 2 * len(self._pages) + 64:  # most entries are of pages used since
            self._heap = [entry for entry in self._heap if self._is_current(entry[-1], entry[-2])]
            heapq.heapify(self._heap)
            self._changes = [entry for entry in self._changes if self._is_current(entry[-1], entry[-2])]
            heapq.heapify(self._changes)
        now = self._clock() if self._timed else 0.0
        heapq.heappush(self._heap, (*self._rank(use, now), version, page))
        if self._timed and (moment := self._eviction.changes_at(use, now)) < inf:
            heapq.heappush(self._changes, (moment, version, page))
