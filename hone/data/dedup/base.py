"""The base of deduplications, which map every document to the representative of its group of duplicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from hone.base.errors import MissingExtra
from hone.base.spec import Quiet
from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.dedup.choice import LOWEST_ID, WITH_COLUMN, ranks
from hone.data.dedup.earlier import Shard, ids_of, record_of, shards_of, sign, sign_tasks
from hone.data.executors.task import Function, Task, perform

if TYPE_CHECKING:
    from hone.data.dedup.joining import Joining


class Found(NamedTuple):
    """The groups of duplicates. `stands` (int [num_documents]) is the representative of each document's group, its own index when it is that.

    `earlier` maps the representative of a group that an earlier artifact has a document of to that document's id: all of
    such a group is dropped. `figures` are for stats.json.
    """

    stands: np.ndarray
    earlier: dict[int, str]
    figures: dict[str, Any] = {}  # noqa: RUF012

    def kept(self, before: np.ndarray) -> np.ndarray:
        """Which of the documents in `before` (bool [num_documents]) stay."""
        kept = before & (self.stands == np.arange(len(self.stands), dtype=self.stands.dtype))
        kept[list(self.earlier)] = False
        return kept

    def known(self) -> np.ndarray:
        """Which documents (bool [num_documents]) are in a group with a document of an earlier artifact."""
        marked = np.zeros(len(self.stands), bool)
        marked[list(self.earlier)] = True
        return marked[self.stands]


class Dedup(Technique):
    """Finds groups of duplicate documents and keeps one of each, the same whatever the order of reading unless `keep` is 'first'."""

    reason: ClassVar[str] = "duplicate"

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        """The groups of the documents where `kept` (bool [num_documents]). Files in the folder `state` are reused by a resumed run."""
        raise NotImplementedError

    def representatives(self, corpus: Corpus, kept: np.ndarray, state: Path) -> np.ndarray:
        """`Found.stands` of `compare`."""
        return self.compare(corpus, kept, state).stands

    def files(self) -> dict[str, Path]:
        """Field names and files whose content the result depends on: part of the identity of the artifact."""
        return {}

    def memory_bytes(self, documents: float) -> float:
        """Bytes that it holds for `documents` in the calling process, beyond what every deduplication does."""
        return 0.0

    def alone(self) -> Dedup:
        """The technique for a sample of the input: without earlier artifacts, and with any copy of a group."""
        return self


class Joined(Dedup):
    """A deduplication by keys: documents that share a key are in one group, also when linked through other documents.

    Tasks compare the keys, in rounds; `prepare` computes keys that depend on the texts first.
    """

    keep: Annotated[Literal["lowest_id", "first", "longest", "newest", "highest", "lowest", "source"], Quiet()] = Field(
        LOWEST_ID,
        description="The copy of a group that stays: that with the lowest id (a hash: no preference), the first read, the longest, "
        "the newest by the date in `column`, that with the highest or lowest value in `column`, or of the first of `sources`. "
        "Of equal ones that with the lowest id.",
    )
    column: Annotated[str, Quiet()] = Field(
        "", description="For newest, highest and lowest: a signal, a scorer's column, or one of metadata_fields."
    )
    sources: Annotated[tuple[str, ...], Quiet()] = Field(
        (), description="For keep = source: sources (top folders), the preferred one first; others are last."
    )
    against: Annotated[tuple[str, ...], Quiet()] = Field(
        (), description="Folders of finished data artifacts: documents that are duplicates of one in there are dropped."
    )

    @model_validator(mode="after")
    def _has_what_it_keeps_by(self) -> Joined:
        if (self.keep in WITH_COLUMN) != bool(self.column):
            raise ValueError(f"keep = {self.keep} {'needs' if not self.column else 'takes no'} column")
        if (self.keep == "source") != bool(self.sources):
            raise ValueError(f"keep = {self.keep} {'needs' if not self.sources else 'takes no'} sources")
        return self

    def files(self) -> dict[str, Path]:
        return {f"against.{number}": record_of(folder) for number, folder in enumerate(self.against)}

    def alone(self) -> Dedup:
        return self.model_copy(update={"against": (), "keep": LOWEST_ID, "column": "", "sources": ()})

    def joining(self, corpus: Corpus, kept: np.ndarray, state: Path, earlier: Sequence[Shard] = ()) -> Joining:
        """The comparison of the keys, also with those of `earlier`; those that `prepare` and `sign` compute are in `state`."""
        raise NotImplementedError

    def rounds(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round, after `prepare`; all tasks of a round must be done before the next round."""
        need_numba()
        earlier = shards_of(self.against, len(corpus))
        if tasks := sign_tasks(self, earlier, state):
            yield sign, tasks
        yield from self.joining(corpus, kept, state, earlier).rounds()

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        need_numba()
        if hasattr(self, "prepare"):
            self.prepare(corpus, kept, state)
        for function, tasks in self.rounds(corpus, kept, state):
            for task in tasks:
                perform(function, task)
        earlier = shards_of(self.against, len(corpus))
        groups = self.joining(corpus, kept, state, earlier).groups()
        known = groups[len(corpus) :]
        groups = groups[: len(corpus)]
        met: dict[int, str] = {}
        if earlier:
            numbers = np.flatnonzero(known < len(corpus))
            for group, ident in zip(known[numbers].tolist(), ids_of(earlier, numbers + len(corpus))):
                met[group] = min(met.get(group, ident), ident)
        rank = ranks(self.keep, self.column, self.sources, corpus, _shared(groups, kept))
        stands = lowest_ids(groups, corpus.columns["id"], rank)
        return Found(stands, {int(stands[group]): ident for group, ident in met.items()})


def _shared(groups: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Which documents (bool [n]) are in a group of several; `groups` (int [n]) has the lowest index of each one's group."""
    several = np.zeros(len(groups), bool)
    several[groups[groups != np.arange(len(groups), dtype=groups.dtype)]] = True
    return several[groups] & kept


def need_numba() -> None:
    """Raises MissingExtra without numba."""
    try:
        import numba  # noqa: F401
    except ImportError:
        raise MissingExtra.of("deduplication", "numba", "data") from None


def lowest_ids(groups: np.ndarray, ids: np.ndarray, rank: np.ndarray | None = None) -> np.ndarray:
    """For each document (int [n]) the document of its group with the lowest (rank, id); overwrites `groups` with the result.

    `groups` (int [n], each 0 <= group < n) is equal for documents of one group; `ids` [n] are strings or numbers, ordered
    as Python orders them; `rank` (uint64 [n]), without which ids alone decide. Of equal ones in a group, the lower index is taken.
    """
    from hone.text.dedup.union_find import least_members

    letters = _letters(ids)
    if rank is not None:
        high = rank.astype(">u8").view(np.uint8).reshape(len(rank), 8)
        letters = np.hstack([high.astype(letters.dtype), letters])
    least_members(groups, letters)
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
