"""Exact deduplication by a 64-bit hash of the normalized text."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from hone.data.corpus import Corpus
from hone.data.dedup.base import Dedup, lowest_ids, need_numba


class Exact(Dedup):
    """Drops documents whose normalized text is in the corpus already (64-bit hash of words, spaces and line breaks)."""

    reason: ClassVar[str] = "exact_duplicate"

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        need_numba()
        members = np.flatnonzero(alive)
        hashes = corpus.columns["text_hash"][members]
        order = np.argsort(hashes)
        hashes, members = hashes[order], members[order]
        fresh = np.ones(len(members), bool)
        fresh[1:] = hashes[1:] != hashes[:-1]
        groups = np.arange(len(alive))
        groups[members] = members[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
        return lowest_ids(groups, corpus.columns["id"])
