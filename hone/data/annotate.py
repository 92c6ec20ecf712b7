"""Annotate: input files to one Parquet shard of documents with all their signal columns, a batch of text at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hone.base.lazy import lazy
from hone.data.corpus import BATCH_BYTES, schema
from hone.data.language import NO_LANGUAGE, Identifier
from hone.data.readers.listing import File
from hone.data.readers.read import Broken, Document, Options, poisoned, read_file
from hone.data.signals import signals_of
from hone.data.text.batch import Texts

pa = lazy("pyarrow")
parquet = lazy("pyarrow.parquet")

TASK_BYTES = 4 << 20
"""Input bytes a task gathers: the unit that a kill can cost. A larger file is a task of its own."""
_BATCH_DOCUMENTS = 1 << 16
_SAMPLES = 3


class Scorer(Protocol):
    """What annotation needs of a scorer: more columns of a batch, of the same names and types for every batch, an empty one too."""

    def columns(self, texts: Texts) -> dict[str, np.ndarray]: ...


class Care(NamedTuple):
    """How to go through documents of which one killed the process: each is noted in `note` before it is touched.

    Those in `killers`, as notes say them, are set aside instead.
    """

    note: Path
    killers: tuple[str, ...] = ()

    def deadly(self, step: str, which: str) -> bool:
        """Whether document `which` is known to kill in `step`; if not, notes that it comes next."""
        line = f"{step} {which}"
        if line in self.killers:
            return True
        self.note.write_text(line, encoding="utf8")
        return False


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
    scorers: Sequence[Scorer] = (),
    max_bytes: int | None = None,
    care: Care | None = None,
) -> dict[str, Any]:
    """Reads `files` into the Parquet shard `out` with all columns; returns what it holds and what was broken.

    Stops before the document that would bring the text above `max_bytes`. With `care` documents are gone through one by
    one. The summary: rows, bytes, full, broken {reason: {documents, bytes}}, samples of the broken.
    """
    broken: dict[str, dict[str, int]] = defaultdict(lambda: {"documents": 0, "bytes": 0})
    summary: dict[str, Any] = {"rows": 0, "bytes": 0, "full": False, "broken": broken, "samples": []}
    whole = schema(extra_fields(scorers))

    def set_aside(item: Broken) -> None:
        count = broken[item.reason]
        count["documents"] += 1
        count["bytes"] += item.num_bytes
        if count["documents"] <= _SAMPLES:
            summary["samples"].append({"reason": item.reason, "source": item.source, "text": item.text})

    with parquet.ParquetWriter(out, whole, compression="zstd") as writer:
        waiting = _Waiting()

        def flush() -> None:
            for part in _annotated(waiting, identifier, scorers, set_aside, care):
                summary["rows"] += part["rows"]
                summary["bytes"] += part["bytes"]
                writer.write_batch(
                    pa.RecordBatch.from_arrays([part["arrays"][name] for name in whole.names], schema=whole)
                )
            waiting.clear()

        for item in _documents(files, options, care):
            if isinstance(item, Broken):
                set_aside(item)
                continue
            raw = item.text.encode()
            if max_bytes is not None and summary["bytes"] + waiting.num_bytes + len(raw) > max_bytes:
                flush()  # a document that fails here makes room
                if summary["bytes"] + len(raw) > max_bytes:
                    summary["full"] = True
                    break
            waiting.add(item, raw)
            if waiting.num_bytes >= BATCH_BYTES or len(waiting.documents) >= _BATCH_DOCUMENTS:
                flush()
        flush()
    return summary


def extra_fields(scorers: Sequence[Scorer]) -> list[tuple[str, Any]]:
    """(name, Arrow type) of the columns that `scorers` add, found by asking them about no text."""
    nothing = Texts(np.empty(0, np.uint8), np.zeros(1, np.int64))
    return [
        (name, pa.from_numpy_dtype(values.dtype))
        for scorer in scorers
        for name, values in scorer.columns(nothing).items()
    ]


class _Waiting:
    """Documents gathered for a batch, their texts as bytes only."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.documents: list[Document] = []
        self.raw: list[bytes] = []
        self.num_bytes = 0

    def add(self, document: Document, raw: bytes) -> None:
        self.documents.append(document._replace(text=""))
        self.raw.append(raw)
        self.num_bytes += len(raw)


def _documents(files: Sequence[File], options: Options, care: Care | None) -> Iterator[Document | Broken]:
    for file in files:
        items = read_file(file, options)
        if care is None:
            yield from items
            continue
        for number in itertools.count():
            if care.deadly("read", f"{file.name}#{number}"):  # the reader cannot step over it: what follows is lost too
                yield Broken("killed_the_reader", file.name, "", file.size if number == 0 else 0)
                break
            item = next(items, None)
            if item is None:
                break
            yield item


def _annotated(
    waiting: _Waiting,
    identifier: Identifier,
    scorers: Sequence[Scorer],
    set_aside: Callable[[Broken], None],
    care: Care | None,
) -> Iterator[dict[str, Any]]:
    """The batch as {rows, bytes, arrays}; of one that raises, what is left once each poison document is set aside."""
    if not waiting.documents:
        return
    if care is None:
        try:
            yield _arrays(waiting.documents, waiting.raw, identifier, scorers)
            return
        except BaseException as error:
            if not poisoned(error):
                raise
    good_documents, good_raw = [], []
    for document, raw in zip(waiting.documents, waiting.raw):
        if care is not None and care.deadly("annotate", document.id):
            set_aside(Broken("killed_the_worker", document.source, raw.decode()[:400], len(raw)))
            continue
        try:
            _arrays([document], [raw], identifier, scorers)
        except BaseException as error:
            if not poisoned(error):
                raise
            set_aside(Broken(f"failed_{type(error).__name__}", document.source, raw.decode()[:400], len(raw)))
        else:
            good_documents.append(document)
            good_raw.append(raw)
    if good_documents:
        yield _arrays(good_documents, good_raw, identifier, scorers)


def _arrays(
    documents: Sequence[Document], raw: Sequence[bytes], identifier: Identifier, scorers: Sequence[Scorer]
) -> dict[str, Any]:
    """Column name to Arrow array of a batch, with its documents and bytes."""
    texts = _joined(raw)
    is_prose = np.fromiter((document.kind != "code" for document in documents), bool, len(documents))
    codes = np.full(len(documents), NO_LANGUAGE, object)
    sure = np.ones(len(documents))
    if is_prose.any():
        prose = texts if is_prose.all() else _joined([text for text, wanted in zip(raw, is_prose) if wanted])
        codes[is_prose], sure[is_prose] = identifier.identify_all(prose)
    columns: dict[str, np.ndarray] = dict(signals_of(texts))
    for scorer in scorers:
        columns |= scorer.columns(texts)
    arrays = {
        "text": pa.LargeStringArray.from_buffers(len(raw), pa.py_buffer(texts.offsets), pa.py_buffer(texts.data)),
        "family": pa.array(np.fromiter((document.family for document in documents), np.uint64, len(documents))),
        "language": pa.array(codes, pa.string()),
        "language_score": pa.array(sure),
        **{
            name: pa.array([getattr(document, name) for document in documents], pa.string())
            for name in Document._fields
            if name in ("id", "source", "group", "kind")
        },
        **{name: pa.array(values, pa.from_numpy_dtype(values.dtype)) for name, values in columns.items()},
    }
    return {"rows": len(documents), "bytes": texts.num_bytes, "arrays": arrays}


def _joined(raw: Sequence[bytes]) -> Texts:
    offsets = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(text) for text in raw], out=offsets[1:])
    return Texts(np.frombuffer(b"".join(raw), np.uint8), offsets)
