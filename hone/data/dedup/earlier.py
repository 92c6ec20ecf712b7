"""Earlier: the documents of finished data artifacts, with which new documents are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.artifact import MANIFEST
from hone.base.durable import sha256
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.executors.task import Task

parquet = lazy("pyarrow.parquet")


def record_of(folder: str) -> Path:
    """The file that identifies the data artifact in `folder`. Raises SpecError when there is none with documents."""
    path = Path(folder).expanduser().absolute()
    if not (path / MANIFEST).is_file() or not (path / "documents").is_dir():
        raise SpecError(
            f"dedup.against = '{folder}' is not a finished data artifact ({MANIFEST} and documents/)",
            fix="give the folder that an earlier hone data wrote",
        )
    return path / MANIFEST


class Shard(NamedTuple):
    """A file of documents of an earlier artifact; `first` is the number of its first document, counted on from the new documents."""

    path: Path
    first: int
    rows: int
    record: str


def shards_of(folders: Sequence[str], first: int) -> list[Shard]:
    """All files of documents of the artifacts in `folders`; document numbers begin at `first`."""
    found = []
    for folder in folders:
        record = record_of(folder)
        which = sha256(record)
        for path in sorted((record.parent / "documents").glob("*.parquet")):
            rows = parquet.read_metadata(path).num_rows
            found.append(Shard(path, first, rows, which))
            first += rows
    return found


def sign_tasks(technique: Technique, shards: Sequence[Shard], state: Path) -> list[Task]:
    """The tasks that compute the keys of each of `shards` into `state`; none for a technique that reads them off the columns."""
    if not shards or not hasattr(technique, "prepare"):
        return []
    said = technique.model_dump(mode="json", exclude={"against", "keep", "column", "sources"})
    return [
        Task(
            path.stem,
            state,
            {"technique": technique, "shard": shard.path, "name": path.name},
            [said, shard.path.name, shard.rows, shard.record],
        )
        for shard, path in zip(shards, keys_of(shards, state))
    ]


def keys_of(shards: Sequence[Shard], state: Path) -> list[Path]:
    """The files that the tasks of `sign_tasks` write."""
    return [state / f"earlier-{number:05d}.u64" for number in range(len(shards))]


def sign(folder: Path, technique: Any, shard: Path, name: str) -> dict[str, Any]:
    """Computes the keys of one file of documents into file `name` of `folder`."""
    corpus = Corpus([shard])
    (made,) = technique.prepare(corpus, np.ones(len(corpus), bool), folder)
    made.rename(folder / name)
    return {"rows": len(corpus)}


def ids_of(shards: Sequence[Shard], numbers: np.ndarray) -> list[str]:
    """The ids of the documents with these numbers (int [k])."""
    ids = [""] * len(numbers)
    for shard in shards:
        here = np.flatnonzero((numbers >= shard.first) & (numbers < shard.first + shard.rows))
        if len(here):
            column = parquet.read_table(shard.path, columns=["id"]).column(0)
            for place, ident in zip(here.tolist(), column.take(numbers[here] - shard.first).to_pylist()):
                ids[place] = ident
    return ids


def counted(corpus: Corpus, shards: Sequence[Shard]) -> int:
    """Number of documents of `corpus` and of `shards` together."""
    return len(corpus) + sum(shard.rows for shard in shards)


def with_keys(
    files: Sequence[Path], shards: Sequence[Shard], state: Path, width: int
) -> tuple[tuple[Path, ...], int, tuple[int, ...]]:
    """(files, width, shifts) of `joining.Numbers`: the `files` of the new documents, then those of the earlier ones."""
    if not shards:
        return tuple(files), width, ()
    shifts = (*(0 for _ in files), *(shard.first for shard in shards))
    return (*files, *keys_of(shards, state)), width, shifts
