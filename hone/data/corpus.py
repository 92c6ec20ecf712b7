"""Corpus: documents and their signal columns in Parquet shards on disk; columns are held in memory, texts are not."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import write_atomic
from hone.base.errors import MissingExtra
from hone.base.lazy import lazy
from hone.data.language import NO_LANGUAGE, Identifier
from hone.data.readers.listing import File
from hone.data.readers.read import Broken, Document, Options, poisoned, read_file
from hone.data.signals import SIGNALS, signals

pa = lazy("pyarrow")
parquet = lazy("pyarrow.parquet")

TASK_BYTES = 4 << 20
"""Input bytes a task gathers: the unit that a kill can cost. A larger file is a task of its own."""
GROUP_BYTES = 16 << 20
"""Text held in memory before it is written."""
_GROUP_ROWS = 2000
_SAMPLES = 3
_TEXTS = ("id", "source", "group", "kind", "language")


def need_parquet() -> None:
    """Raises MissingExtra without pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra.of("the data stage", "pyarrow", "data") from None


def tasks(files: Sequence[File]) -> list[list[File]]:
    """`files` in order, cut into groups of about TASK_BYTES."""
    groups: list[list[File]] = []
    size = TASK_BYTES
    for file in files:
        if size >= TASK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def annotate(
    files: Sequence[File],
    out: Path,
    *,
    options: Options,
    identifier: Identifier,
    max_bytes: int | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Reads `files` into the Parquet shard `out` with all signal columns; returns (and writes beside it) what was broken.

    Stops before the document that would bring the text above `max_bytes`. Both files appear whole or not at all, the
    shard last. The returned summary: documents, bytes, full, broken {reason: {documents, bytes}}, samples of the broken.
    """
    broken: dict[str, dict[str, int]] = defaultdict(lambda: {"documents": 0, "bytes": 0})
    summary: dict[str, Any] = {"documents": 0, "bytes": 0, "full": False, "broken": broken, "samples": []}
    temporary = out.with_name(out.name + ".tmp")
    with parquet.ParquetWriter(temporary, schema(), compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        waiting = 0
        for item in _documents(files, options, progress):
            if isinstance(item, Document):
                try:
                    row = _row(item, identifier)
                except BaseException as error:  # a poison document is set aside alone
                    if not poisoned(error):
                        raise
                    item = Broken(f"failed_{type(error).__name__}", item.source, item.text[:400], len(item.text))
            if isinstance(item, Broken):
                count = broken[item.reason]
                count["documents"] += 1
                count["bytes"] += item.num_bytes
                if count["documents"] <= _SAMPLES:
                    summary["samples"].append({"reason": item.reason, "source": item.source, "text": item.text})
                continue
            if max_bytes is not None and summary["bytes"] + row["bytes"] > max_bytes:
                summary["full"] = True
                break
            rows.append(row)
            waiting += row["bytes"]
            summary["documents"] += 1
            summary["bytes"] += row["bytes"]
            if waiting > GROUP_BYTES or len(rows) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema()))
                rows, waiting = [], 0
        writer.write_table(pa.Table.from_pylist(rows, schema()))
    write_atomic(out.with_suffix(".json"), json.dumps(summary, sort_keys=True).encode())
    publish(temporary, out)
    return summary


def publish(temporary: Path, final: Path) -> None:
    """Makes a finished file visible under its name: synced, then renamed."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)


def schema() -> Any:
    """The Arrow schema of a shard."""
    return pa.schema(
        [
            ("id", pa.string()),
            ("text", pa.large_string()),
            ("source", pa.string()),
            ("group", pa.string()),
            ("kind", pa.string()),
            ("family", pa.uint64()),
            ("language", pa.string()),
            ("language_score", pa.float64()),
            *((name, getattr(pa, kind)()) for name, kind in SIGNALS.items()),
        ]
    )


def _documents(files: Sequence[File], options: Options, progress: Callable[[int], None]) -> Iterator[Document | Broken]:
    for file in files:
        yield from read_file(file, options)
        progress(file.size)


def _row(document: Document, identifier: Identifier) -> dict[str, Any]:
    language, score = (NO_LANGUAGE, 1.0) if document.kind == "code" else identifier.identify(document.text)
    return {**document._asdict(), "language": language, "language_score": score, **signals(document.text)}


class Corpus:
    """All documents of `shards` in order. `columns` maps each column but the text to a numpy array [num_documents]."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self.shards = list(shards)
        names = [name for name in schema().names if name != "text"]
        tables = [parquet.read_table(shard, columns=names) for shard in self.shards]
        self.sizes = [len(table) for table in tables]
        table = pa.concat_tables(tables) if tables else schema().empty_table().select(names)
        self.columns: dict[str, np.ndarray] = {
            name: np.array(table.column(name).to_pylist(), dtype=str)
            if name in _TEXTS
            else table.column(name).to_numpy()
            for name in names
        }

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.columns["bytes"].sum())

    def spans(self) -> Iterator[tuple[int, Path, int, int]]:
        """(number, path, first, end) of each shard: documents `first`..`end` of the corpus lie in it."""
        first = 0
        for number, (shard, size) in enumerate(zip(self.shards, self.sizes)):
            yield number, shard, first, first + size
            first += size

    def texts(self, shard: Path, first: int, chosen: np.ndarray) -> Iterator[tuple[int, str]]:
        """(index, text) of the documents of `shard`, whose first is number `first`, where `chosen` (bool [num_documents])."""
        index = first
        with parquet.ParquetFile(shard) as file:
            for batch in file.iter_batches(batch_size=64, columns=["text"]):
                for text in batch.column(0):
                    if chosen[index]:
                        yield index, text.as_py()
                    index += 1
