"""Eviction: pages that were never found again first, then the others, each by last use."""

from __future__ import annotations

from pydantic import Field

from hone.serve.eviction.eviction import Eviction, PageUse


class SLRU(Eviction):
    """Give out pages below `protected_hits` hits first, by last use; then the rest. Segmented LRU: Karedla et al. 1994.

    The paper bounds the protected segment and returns pages from its end to the other one. Here it has no bound: a page that
    was hit often enough is given out only when no other is left.
    """

    protected_hits: int = Field(1, ge=1, description="Hits from which a page is protected.")

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        return (use.hits >= self.protected_hits,)
