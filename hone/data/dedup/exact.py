"""Exact deduplication by a 64-bit hash of the normalized text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hone.base.lazy import lazy
from hone.data.corpus import Corpus
from hone.data.dedup.base import Joined
from hone.data.dedup.earlier import Shard, counted

if TYPE_CHECKING:
    from hone.data.dedup.joining import Joining

parquet = lazy("pyarrow.parquet")


class Exact(Joined):
    """Drops documents whose normalized text is already in the corpus (64-bit hash of words, spaces and line breaks)."""

    reason: ClassVar[str] = "exact_duplicate"

    def joining(self, corpus: Corpus, kept: np.ndarray, state: Path, earlier: Sequence[Shard] = ()) -> Joining:
        from hone.data.dedup.joining import Equal, Joining

        parts = [
            ComparedRows(shard, first, end - first, int(kept[first:end].sum()), np.packbits(kept[first:end]).tobytes())
            for _, shard, first, end in corpus.spans()
        ]
        for shard in earlier:
            everyone = np.packbits(np.ones(shard.rows, bool)).tobytes()
            parts.append(ComparedRows(shard.path, shard.first, shard.rows, shard.rows, everyone))
        return Joining(Hashes(tuple(parts)), Equal(1), state, counted(corpus, earlier))


class ComparedRows(NamedTuple):
    """The `count` documents of a shard that are compared: those whose bit is set in `chosen`. `first` is the index of its first document."""

    shard: Path
    first: int
    rows: int
    count: int
    chosen: bytes


class Hashes(NamedTuple):
    """The column of hashes of some shards, read by the tasks that compare them: no process holds it for all documents."""

    parts: tuple[ComparedRows, ...]

    @property
    def sizes(self) -> list[int]:
        return [part.count for part in self.parts]

    def content(self) -> list[Any]:
        return [
            [part.shard.name, part.shard.stat().st_size, part.first, part.rows, _digest(part.chosen)]
            for part in self.parts
        ]

    def part(self, begin: int, end: int) -> Hashes:
        return Hashes(self.parts[begin:end])

    def read(self, begin: int, end: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
        owners, numbers = np.empty(sum(self.sizes), kind), np.empty((1, sum(self.sizes)), np.uint64)
        done = 0
        for part in self.parts:
            chosen = np.unpackbits(np.frombuffer(part.chosen, np.uint8), count=part.rows).view(bool)
            hashes = parquet.read_table(part.shard, columns=["text_hash"]).column(0).to_numpy()
            owners[done : done + part.count] = np.flatnonzero(chosen) + part.first
            numbers[0, done : done + part.count] = hashes[chosen]
            done += part.count
        return owners, numbers


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
