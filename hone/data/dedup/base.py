"""What a deduplication is: it says for each document which one stands for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from hone.base.figure import Estimate
from hone.base.table import Technique
from hone.data.corpus import Corpus


class Dedup(Technique):
    """Finds groups of documents that are the same. Of each group the one with the lowest id stays, in any order of reading."""

    reason: ClassVar[str] = "duplicate"

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        """For each document (int64 [num_documents]) the index of the one that stands for it; itself when it stays.

        Only documents where `alive` (bool) take part. `state` is a folder for what a killed run need not do again.
        """
        raise NotImplementedError

    def estimates(self, kept_bytes: float) -> dict[str, Estimate]:  # type: ignore[override]
        """Bytes left: at most what comes in; how much repeats cannot be seen in a sample."""
        return {"kept_bytes": Estimate(value=kept_bytes, unit="B", formula="all that the filters keep", bound=True)}


def lowest_ids(groups: Iterable[np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Representatives for `groups` of document indices (each int [k]): the member with the lowest id."""
    result = np.arange(len(ids))
    for group in groups:
        result[group] = min(group, key=lambda index: ids[index])
    return result
