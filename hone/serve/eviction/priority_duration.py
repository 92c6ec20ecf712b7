"""Eviction: the lowest priority first; requests give priorities to token ranges, for a time."""

from __future__ import annotations

from typing import ClassVar

from hone.serve.eviction.eviction import DEFAULT_PRIORITY, Eviction, PageUse


class PriorityDuration(Eviction):
    """Give out the lowest priority first, of equal ones by last use; a priority ends after its duration. As TensorRT-LLM does.

    A request sets priorities with `Request.retention`: of a token range, 0 to 100, for some seconds after the request
    has ended or for ever. Pages of other ranges, and those whose time is over, have priority 35.
    """

    reads_retention: ClassVar[bool] = True

    def key(self, use: PageUse, now: float) -> tuple[float, ...]:
        return (use.priority if now < use.until else DEFAULT_PRIORITY,)

    def changes_at(self, use: PageUse, now: float) -> float:
        return use.until if now < use.until else float("inf")
