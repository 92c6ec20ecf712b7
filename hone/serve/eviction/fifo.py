"""Eviction: the page that entered the cache first, however often it was used since."""

from __future__ import annotations

from hone.serve.eviction.eviction import Eviction, PageUse


class FIFO(Eviction):
    """Give out the page that entered the cache first. Belady 1966: the baseline of every cache."""

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        return (use.published,)
