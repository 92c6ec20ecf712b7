"""The base of deduplications, which map every document to the representative of its group of duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from hone.base.errors import MissingExtra
from hone.base.lazy import resolve
from hone.base.table import Technique

if TYPE_CHECKING:
    from hone.data.corpus import Corpus
    from hone.data.dedup.groups import Found
    from hone.data.executors.task import Function, Task
    from hone.text.batch import Texts

_WITH_COLUMN = ("newest", "highest", "lowest")


class Dedup(Technique):
    """Finds groups of duplicate documents and keeps one of each, the same whatever the order of reading unless `keep` is 'first'.

    Specs load without the packages of the extra 'data'; what they do is in other files, imported on use.
    """

    reason: ClassVar[str] = "duplicate"

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        """The groups of the documents where `kept` (bool [num_documents]). Files in the folder `state` are reused by a resumed run."""
        raise NotImplementedError

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

    A document has `num_keys` keys, each in a table of its own: by default one, the hash of its text, which is a column. Equal keys join, or those
    that differ in at most `most_bits` bits. Tasks compare the keys, in rounds.
    """

    keep: Literal["lowest_id", "first", "longest", "newest", "highest", "lowest", "source"] = Field(
        "lowest_id",
        description="The copy of a group that stays: that with the lowest id (a hash: no preference), the first read, the longest, "
        "the newest by the date in `column`, that with the highest or lowest value in `column`, or of the first of `sources`. "
        "Of equal ones that with the lowest id.",
    )
    column: str = Field(
        "", description="For newest, highest and lowest: a signal, a scorer's column, or one of metadata_fields."
    )
    sources: tuple[str, ...] = Field(
        (), description="For keep = source: sources (top folders), the preferred one first; others are last."
    )
    against: tuple[str, ...] = Field(
        (), description="Folders of finished data artifacts: documents that are duplicates of one in there are dropped."
    )

    @model_validator(mode="after")
    def _has_what_it_keeps_by(self) -> Joined:
        if (self.keep in _WITH_COLUMN) != bool(self.column):
            raise ValueError(f"keep = {self.keep} {'needs' if not self.column else 'takes no'} column")
        if (self.keep == "source") != bool(self.sources):
            raise ValueError(f"keep = {self.keep} {'needs' if not self.sources else 'takes no'} sources")
        return self

    @property
    def num_keys(self) -> int:
        return 1

    @property
    def most_bits(self) -> int:
        return 0

    def files(self) -> dict[str, Path]:
        if not self.against:
            return {}
        record_of = resolve("hone.data.dedup.keys:record_of")
        return {f"against.{number}": record_of(folder) for number, folder in enumerate(self.against)}

    def alone(self) -> Dedup:
        return self.model_copy(update={"against": (), "keep": "lowest_id", "column": "", "sources": ()})

    def rounds(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round, after `prepare`; all tasks of a round must be done before the next round."""
        MissingExtra.need("deduplication", "numba", "data")
        yield from resolve("hone.data.dedup.groups:rounds")(self, corpus, kept, state)

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        MissingExtra.need("deduplication", "numba", "data")
        return resolve("hone.data.dedup.groups:compare")(self, corpus, kept, state)


class Signed(Joined):
    """A deduplication whose keys are computed from the texts, shard by shard, before they are compared."""

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> list[Path]:
        """Files of the keys of each shard of `corpus`, computed where they are missing."""
        MissingExtra.need("deduplication", "numba", "data")
        return resolve("hone.data.dedup.keys:sign_shards")(corpus, chosen, state, self.num_keys, self.keys)

    def keys(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Keys of n texts (uint64 [num_keys, n]), and which texts have a word (bool [n])."""
        raise NotImplementedError

    def unit_table(self) -> Any:
        """The table of letters that the kernels of keys take."""
        return resolve("hone.text.units:unit_table")()
