"""Eviction: the page that was used longest ago."""

from __future__ import annotations

from hone.serve.eviction.eviction import Eviction, PageUse


class LRU(Eviction):
    """Give out the page that was freed longest ago. Mattson et al. 1970 (stack algorithms)."""

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        return ()
