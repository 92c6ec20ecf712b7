"""Clusters: the groups of duplicates after all deduplications, as columns of the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hone.base.lazy import lazy
from hone.data.dedup.base import Found

pa = lazy("pyarrow")

COLUMNS = ("cluster", "cluster_size")
"""The id of the copy that stays (of an earlier artifact's document, if the group was dropped for one), and how many copies were compared."""


class Named(NamedTuple):
    """The clusters of some documents: `ids` (bytes [n]) and `sizes` (int32 [n]); size 0 for a document that was not compared."""

    ids: np.ndarray
    sizes: np.ndarray

    def added(self, table: Any, place: int, here: slice) -> Any:
        """`table` with the columns of the documents in `here`, from column `place` on; null where not compared."""
        compared = self.sizes[here] > 0
        named = pa.array(np.char.decode(self.ids[here], "ascii"), pa.string(), mask=~compared)
        counted = pa.array(self.sizes[here], pa.int32(), mask=~compared)
        return table.add_column(place, COLUMNS[0], named).add_column(place + 1, COLUMNS[1], counted)


class Clusters:
    """The groups of the documents where `compared` (bool [num_documents]), joined by one deduplication after the other."""

    def __init__(self, compared: np.ndarray) -> None:
        from hone.text.dedup.union_find import singles

        self._compared = compared
        self._stands = singles(len(compared))
        self._earlier: dict[int, str] = {}

    def join(self, found: Found) -> None:
        """Adds the groups of another deduplication, which compared the representatives of the groups so far."""
        self._stands = found.stands[self._stands]
        self._earlier |= found.earlier

    def named(self, ids: np.ndarray) -> Named:
        """The columns of all documents; `ids` (bytes [num_documents]) are theirs."""
        sizes = np.bincount(self._stands[self._compared], minlength=len(ids)).astype(np.int32)
        names = ids
        if self._earlier:
            width = max(ids.itemsize, *(len(ident.encode()) for ident in self._earlier.values()))
            names = ids.astype(f"S{width}")
            for index, ident in self._earlier.items():
                names[index] = ident.encode()
        return Named(names[self._stands], np.where(self._compared, sizes[self._stands], np.int32(0)))
