"""Eviction: the page that was found least often."""

from __future__ import annotations

from hone.serve.eviction.eviction import Eviction, PageUse


class LFU(Eviction):
    """Give out the page with the fewest hits, of equal ones the one freed longest ago. Counts are lost with the page."""

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        return (use.hits,)
