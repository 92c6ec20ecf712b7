"""Annotate: reads input files into one Parquet shard of documents with all signal columns, a batch of documents at a time."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from hone.data.corpus import BATCH_BYTES, schema
from hone.data.identifiers import Opened as Identified
from hone.data.quality.base import Opened
from hone.data.signals import signals_of
from hone.feed.files.listing import File
from hone.readers.documents import SAMPLE_CHARS, Batch, Broken, Document, Noted, Options, poisoned
from hone.readers.parts import parts
from hone.readers.read import read_batches, read_file
from hone.text.batch import Texts
from hone.text.signals.code import ROW, looks_like_code

TASK_BYTES = 4 << 20
"""Input bytes of a task, which is what a killed process has to redo. A larger file is a task of its own, or several (readers/parts.py)."""
NO_LANGUAGE = "code"
"""Value of the language column for program text."""
_BATCH_DOCUMENTS = 1 << 16
_SAMPLES = 3


class Care(NamedTuple):
    """How to process documents of which one killed the process: the name of each is written to `note` before it is processed.

    Documents whose names are in `skip` are set aside instead.
    """

    note: Path
    skip: tuple[str, ...] = ()

    def must_skip(self, step: str, which: str) -> bool:
        """Whether document `which` is known to kill the process in `step`; if not, writes its name to `note`."""
        line = f"{step} {which}"
        if line in self.skip:
            return True
        self.note.write_text(line, encoding="utf8")
        return False


def tasks(files: Sequence[File], options: Options) -> list[list[File]]:
    """`files` in order, in groups of about TASK_BYTES; each part of a file that is split is a group of its own."""
    groups: list[list[File]] = []
    size = TASK_BYTES
    for file in files:
        cut = parts(file, options)
        if len(cut) > 1:
            groups += [[part] for part in cut]
            size = TASK_BYTES
            continue
        if size >= TASK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def annotate(
    items: Iterable[Batch | Broken | Noted],
    out: Path,
    *,
    identifier: Identified,
    scorers: Sequence[Opened] = (),
    max_bytes: int | None = None,
    care: Care | None = None,
) -> dict[str, Any]:
    """Writes batches of documents into the Parquet shard `out` with all columns; returns a summary.

    Stops before the document that would bring the text above `max_bytes`. With `care`, documents are processed one by
    one. The summary: rows, bytes, code (rows that look like it), full, broken {reason: {documents, bytes}}, samples of the broken, skipped and repaired
    {what: count}.
    """
    broken: dict[str, dict[str, int]] = defaultdict(lambda: {"documents": 0, "bytes": 0})
    summary: dict[str, Any] = {"rows": 0, "bytes": 0, "code": 0, "full": False, "broken": broken, "samples": []}
    noted: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
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
                summary["code"] += part["code"]
                writer.write_batch(
                    pa.RecordBatch.from_arrays([part["arrays"][name] for name in whole.names], schema=whole)
                )
            waiting.clear()

        for item in items:
            if isinstance(item, Broken):
                set_aside(item)
                continue
            if isinstance(item, Noted):
                noted[item.repaired][item.what] += item.count
                continue
            first, last = 0, item.texts.num_texts
            while first < last and not summary["full"]:
                room = None if max_bytes is None else max_bytes - summary["bytes"]
                end = waiting.add(item, first, room)
                if waiting.is_full or end == first:
                    summary["full"] = end == first and not waiting.num_texts
                    flush()  # also when `max_bytes` is reached: documents that fail here leave room for others
                first = end
            if summary["full"]:
                break
        flush()
    summary["broken"] = dict(broken)  # a plain dict, because it is sent to another process
    summary["skipped"], summary["repaired"] = dict(noted[False]), dict(noted[True])
    return summary


def extra_fields(scorers: Sequence[Opened]) -> list[tuple[str, Any]]:
    """(name, Arrow type) of the columns that `scorers` add, read off the result for an empty batch."""
    nothing = Texts(np.empty(0, np.uint8), np.zeros(1, np.int64))
    return [
        (name, pa.from_numpy_dtype(values.dtype))
        for scorer in scorers
        for name, values in scorer.columns(nothing).items()
    ]


class _Waiting:
    """Documents gathered for a batch. Where a batch ends depends on the documents alone, not on how they arrive."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.parts: list[Batch] = []
        self.num_texts = self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= BATCH_BYTES or self.num_texts >= _BATCH_DOCUMENTS

    def add(self, batch: Batch, first: int, room: int | None) -> int:
        """Adds documents of `batch` from number `first` on until it is full or holds `room` bytes; returns the next number."""
        ends = np.cumsum(np.diff(batch.texts.offsets[first:])) + self.num_bytes
        count = min(int(np.searchsorted(ends, BATCH_BYTES, "left")) + 1, len(ends), _BATCH_DOCUMENTS - self.num_texts)
        if room is not None:
            count = min(count, int(np.searchsorted(ends, room, "right")))
        if count:
            self.parts.append(part_of(batch, slice(first, first + count)))
            self.num_texts += count
            self.num_bytes = int(ends[count - 1])
        return first + count

    def gathered(self) -> Batch:
        """All gathered documents as one batch."""
        if len(self.parts) == 1:
            return self.parts[0]
        columns = ([value for part in self.parts for value in part[index]] for index in range(1, len(Batch._fields)))
        return Batch(_joined([part.texts for part in self.parts]), *columns)


def part_of(batch: Batch, which: slice) -> Batch:
    """The documents in `which` (without a step)."""
    texts = Texts(batch.texts.data, batch.texts.offsets[which.start : which.stop + 1])
    return Batch(texts, *(column[which] for column in batch[1:]))


def _joined(parts: Sequence[Texts]) -> Texts:
    """All texts concatenated, copied."""
    data = [part.data[part.offsets[0] : part.offsets[-1]] for part in parts]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Texts(np.concatenate(data), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def read_items(files: Sequence[File], options: Options, care: Care | None = None) -> Iterator[Batch | Broken | Noted]:
    """What the readers find in `files`; with `care`, document by document."""
    for file in files:
        if care is None:
            yield from read_batches(file, options)
            continue
        items = read_file(file, options)
        for number in itertools.count():
            if care.must_skip("read", f"{file.name}#{number}"):  # a reader cannot skip a document: the rest is lost too
                yield Broken("killed_the_reader", file.name, "", file.size if number == 0 else 0)
                break
            item = next(items, None)
            if item is None:
                break
            yield _alone(item) if isinstance(item, Document) else item


def _alone(document: Document) -> Batch:
    ident, text, *rest = document
    return Batch(Texts.of([text]), [ident], *([value] for value in rest))


def _annotated(
    waiting: _Waiting,
    identifier: Identified,
    scorers: Sequence[Opened],
    set_aside: Callable[[Broken], None],
    care: Care | None,
) -> Iterator[dict[str, Any]]:
    """The batch as {rows, bytes, arrays}; when processing raises, without the documents that raise alone."""
    if not waiting.num_texts:
        return
    batch = waiting.gathered()
    if care is None:
        try:
            yield _arrays(batch, identifier, scorers)
            return
        except BaseException as error:
            if not poisoned(error):
                raise
    good = []
    for number in range(waiting.num_texts):
        one = part_of(batch, slice(number, number + 1))
        reason = ""
        if care is not None and care.must_skip("annotate", one.ids[0]):
            reason = "killed_the_worker"
        else:
            try:
                _arrays(one, identifier, scorers)
            except BaseException as error:
                if not poisoned(error):
                    raise
                reason = f"failed_{type(error).__name__}"
        if reason:
            set_aside(Broken(reason, one.sources[0], next(one.texts.strings())[:SAMPLE_CHARS], one.texts.num_bytes))
        else:
            good.append(number)
    if good:
        yield _arrays(_picked(batch, good), identifier, scorers)


def _picked(batch: Batch, numbers: Sequence[int]) -> Batch:
    """The documents with the indices `numbers`, copied."""
    texts = _joined([part_of(batch, slice(number, number + 1)).texts for number in numbers])
    return Batch(texts, *([column[number] for number in numbers] for column in batch[1:]))


def _arrays(batch: Batch, identifier: Identified, scorers: Sequence[Opened]) -> dict[str, Any]:
    """Column name to Arrow array of a batch, with its rows and bytes."""
    texts, count = batch.texts, batch.texts.num_texts
    is_prose = np.fromiter((kind != "code" for kind in batch.kinds), bool, count)
    codes = np.full(count, NO_LANGUAGE, object)
    sure = np.ones(count)
    if is_prose.any():
        prose = texts if is_prose.all() else _picked(batch, np.flatnonzero(is_prose).tolist()).texts
        codes[is_prose], sure[is_prose] = identifier.identify_all(prose)
    columns: dict[str, np.ndarray] = dict(signals_of(texts, codes.tolist()))
    kinds = np.array(batch.kinds, object)
    rows = kinds == ROW
    if rows.any():
        code = rows & looks_like_code(texts, columns)
        kinds[rows], kinds[code], codes[code], sure[code] = "prose", "code", NO_LANGUAGE, 1.0
    for scorer in scorers:
        columns |= scorer.columns(texts)
    said = {"id": batch.ids, "source": batch.sources, "group": batch.groups, "kind": kinds, "url": batch.urls}
    arrays = {
        "text": texts.to_arrow(),
        "family": pa.array(np.array(batch.families, np.uint64)),
        "language": pa.array(codes, pa.string()),
        "language_score": pa.array(sure),
        **{name: pa.array(values, pa.string()) for name, values in {**said, "metadata": batch.metadata}.items()},
        **{name: pa.array(values, pa.from_numpy_dtype(values.dtype)) for name, values in columns.items()},
    }
    return {"rows": count, "bytes": texts.num_bytes, "code": int((rows & (kinds == "code")).sum()), "arrays": arrays}
