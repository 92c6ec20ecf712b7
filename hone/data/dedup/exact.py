"""Exact deduplication by a 64-bit hash of the normalized text."""

from __future__ import annotations

from typing import ClassVar

from hone.data.dedup.base import Joined


class Exact(Joined):
    """Drops documents whose normalized text is already in the corpus (64-bit hash of words, spaces and line breaks)."""

    reason: ClassVar[str] = "exact_duplicate"
