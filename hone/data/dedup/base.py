"""The base of deduplications, which map every document to the representative of its group of duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hone.base.errors import MissingExtra
from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.executors.task import Function, Task, perform

if TYPE_CHECKING:
    from hone.data.dedup.joining import Joining


class Dedup(Technique):
    """Finds groups of duplicate documents. The one with the lowest id is kept, whatever the order of reading."""

    reason: ClassVar[str] = "duplicate"

    def representatives(self, corpus: Corpus, kept: np.ndarray, state: Path) -> np.ndarray:
        """For each document (int [num_documents]) the index of its group's representative; its own index when it is kept.

        Only documents where `kept` (bool) are compared. Files in the folder `state` are reused by a resumed run.
        """
        raise NotImplementedError


class Joined(Dedup):
    """A deduplication by keys: documents that share a key are in one group, also when linked through other documents.

    Tasks compare the keys, in rounds; `prepare` computes keys that depend on the texts first.
    """

    def joining(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Joining:
        """The comparison of the keys; those that `prepare` computes are in `state`."""
        raise NotImplementedError

    def rounds(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round, after `prepare`; all tasks of a round must be done before the next round."""
        need_numba()
        return self.joining(corpus, kept, state).rounds()

    def representatives(self, corpus: Corpus, kept: np.ndarray, state: Path) -> np.ndarray:
        need_numba()
        if hasattr(self, "prepare"):
            self.prepare(corpus, kept, state)
        joining = self.joining(corpus, kept, state)
        for function, tasks in joining.rounds():
            for task in tasks:
                perform(function, task)
        return lowest_ids(joining.groups(), corpus.columns["id"])


def need_numba() -> None:
    """Raises MissingExtra without numba."""
    try:
        import numba  # noqa: F401
    except ImportError:
        raise MissingExtra.of("deduplication", "numba", "data") from None


def lowest_ids(groups: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """For each document (int [n]) the document of its group with the lowest id; overwrites `groups` with the result.

    `groups` (int [n], each 0 <= group < n) is equal for documents of one group; `ids` [n] are strings or numbers, ordered
    as Python orders them. Of equal ids in a group, the lower index is taken.
    """
    from hone.data.dedup.union_find import least_members

    least_members(groups, _letters(ids))
    return groups


def _letters(ids: np.ndarray) -> np.ndarray:
    """`ids` as unsigned numbers [n, width], whose rows compare lexicographically like the ids."""
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    ids = np.ascontiguousarray(ids)
    if ids.dtype.kind in "US":
        letter = np.uint32 if ids.dtype.kind == "U" else np.uint8
        return ids.view(letter).reshape(len(ids), -1 if len(ids) else 1)
    assert ids.dtype.kind == "u", f"ids must be strings or unsigned numbers, not {ids.dtype}"
    return ids.reshape(-1, 1)
