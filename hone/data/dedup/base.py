"""What a deduplication is: it says for each document which one stands for it."""

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
    """Finds groups of documents that are the same. Of each group the one with the lowest id stays, in any order of reading."""

    reason: ClassVar[str] = "duplicate"

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        """For each document (int [num_documents]) the index of the one that stands for it; itself when it stays.

        Only documents where `alive` (bool) take part. `state` is a folder for what a killed run need not do again.
        """
        raise NotImplementedError


class Joined(Dedup):
    """A deduplication by keys that documents share: documents that share one are a group, and so are those linked through others.

    The numbers are compared by tasks, in rounds. `prepare` is there when they have to be made from the texts first.
    """

    def joining(self, corpus: Corpus, alive: np.ndarray, state: Path) -> Joining:
        """How the numbers are compared; those that `prepare` makes are in `state`."""
        raise NotImplementedError

    def rounds(self, corpus: Corpus, alive: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round, after `prepare`; a round's tasks are all done before the next one's begin."""
        need_numba()
        return self.joining(corpus, alive, state).rounds()

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        need_numba()
        if hasattr(self, "prepare"):
            self.prepare(corpus, alive, state)
        joining = self.joining(corpus, alive, state)
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
    """For each document (int [n]) the one of its group with the lowest id; in the memory of `groups`, which is overwritten.

    `groups` (int [n], each 0 <= group < n) is equal for documents of one group; `ids` [n] are strings or numbers, ordered
    as Python orders them. Equal ids of a group are settled by the lower index.
    """
    from hone.data.dedup.union_find import least_members

    least_members(groups, _letters(ids))
    return groups


def _letters(ids: np.ndarray) -> np.ndarray:
    """`ids` as unsigned numbers [n, width] whose rows compare, column by column, as the ids do."""
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    ids = np.ascontiguousarray(ids)
    if ids.dtype.kind in "US":
        letter = np.uint32 if ids.dtype.kind == "U" else np.uint8
        return ids.view(letter).reshape(len(ids), -1 if len(ids) else 1)
    assert ids.dtype.kind == "u", f"ids are strings or unsigned numbers, not {ids.dtype}"
    return ids.reshape(-1, 1)
