"""Corpus: documents and their signal columns in Parquet shards on disk; columns are read into memory, texts in batches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.lazy import lazy
from hone.data.edits.cuts import Cuts, apply_cuts, join
from hone.data.executors.task import digest
from hone.data.signals import DOCUMENT, SIGNALS
from hone.text.batch import Texts

compute = lazy("pyarrow.compute")
pa = lazy("pyarrow")
parquet = lazy("pyarrow.parquet")

_LONG = ("source", "url", "metadata", "text")
BATCH_BYTES = 16 << 20
"""Bytes of text that are in memory and processed at once: a row group of a shard."""


def publish(temporary: Path, final: Path) -> None:
    """Makes a finished file visible under its final name: synced, then renamed."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)


def schema(more: Sequence[tuple[str, Any]] = ()) -> Any:
    """The Arrow schema of a shard; `more` are (name, type) of additional columns."""
    kinds = DOCUMENT | {name: signal.kind for name, signal in SIGNALS.items()}
    return pa.schema([*((name, getattr(pa, kind)()) for name, kind in kinds.items()), *more])


class Columns(Mapping[str, np.ndarray]):
    """Columns of all shards by name, each [num_documents], read on first use and then kept in memory.

    Short texts (group, kind, language) are numpy strings, ids numpy bytes (strings unless `compact`); the others are
    object arrays in which equal texts are one object.
    """

    def __init__(self, shards: Sequence[Path], names: Sequence[str], *, compact: bool = True) -> None:
        self._shards, self._names, self._compact = list(shards), list(names), compact
        self._read: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._read:
            if name not in self._names:
                raise KeyError(name)
            self._read[name] = self._joined(
                name, (parquet.read_table(shard, columns=[name]).column(0) for shard in self._shards)
            )
        return self._read[name]

    def read(self, names: Iterable[str]) -> None:
        """Reads several columns at once, so that every shard is opened once; ignores unknown names."""
        wanted = [name for name in self._names if name in set(names) and name not in self._read]
        tables = []
        for shard in self._shards:
            with parquet.ParquetFile(shard) as file:
                tables.append(file.read(columns=wanted))
        for name in wanted:
            self._read[name] = self._joined(name, (table.column(name) for table in tables))

    def _joined(self, name: str, parts: Iterable[Any]) -> np.ndarray:
        """Column `name` of all shards, concatenated from the shards' `parts`."""
        if name == "id" and self._compact:  # shard by shard: memory of one is freed before the next
            return np.concatenate([np.empty(0, "S1"), *map(_ascii, parts)])
        known = schema()
        if name in known.names and name != "text" and not pa.types.is_string(kind := known.field(name).type):
            empty = np.empty(0, kind.to_pandas_dtype())
            return np.concatenate([empty, *(part.to_numpy() for part in parts)])
        chunked = list(parts)
        chunks = [chunk for part in chunked for chunk in part.chunks]
        kind = chunked[0].type if chunked else known.field(name).type
        return _as_numpy(pa.chunked_array(chunks, kind), name)

    def forget(self, *names: str) -> None:
        """Frees the memory of columns; they are read again from the shards on next use."""
        for name in names:
            self._read.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def replace(self, name: str, values: np.ndarray) -> None:
        """Makes `values` [num_documents] the column `name`."""
        self._read[name] = values
        if name not in self._names:
            self._names.append(name)


def _ascii(column: Any) -> np.ndarray:
    """An Arrow column of ASCII strings, most of them of one length, as numpy bytes."""
    strings = pa.concat_arrays(column.cast(pa.large_string()).chunks or [pa.array([], pa.large_string())])
    texts = Texts.from_arrow(strings)
    sizes = np.diff(texts.offsets)
    if len(sizes) and sizes[0] and (sizes == sizes[0]).all():
        first = int(texts.offsets[0])
        return texts.data[first : first + texts.num_bytes].copy().view(f"S{sizes[0]}")
    return np.array([text.encode() for text in texts.strings()], bytes) if len(sizes) else np.empty(0, "S1")


def _as_numpy(column: Any, name: str) -> np.ndarray:
    """An Arrow column as numpy; equal strings are one object, null is ''."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column.to_numpy()
    if column.null_count:
        column = column.fill_null("")
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    distinct = encoded.dictionary.to_pylist()
    kinds = (
        np.array(distinct, object if name in _LONG else str)
        if distinct
        else np.empty(0, object if name in _LONG else "U1")
    )
    return kinds[encoded.indices.to_numpy(zero_copy_only=False)]


def lowest(ids: np.ndarray, indices: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `indices` (int [k]) with the lowest `ids` (bytes [n]), in order of ids: a fixed random choice."""
    if not count:
        return indices[:0]
    if len(indices) > count:
        heads = ids[indices].astype("S8").view(">u8").astype(np.uint64)
        indices = indices[heads <= np.partition(heads, count - 1)[count - 1]]
    return indices[np.argsort(ids[indices], kind="stable")][:count]


class Labels(NamedTuple):
    """A column of few distinct texts: `names` are the sorted texts, `codes` (int32 [num_documents]) the index of each document's."""

    names: list[str]
    codes: np.ndarray


class Part(NamedTuple):
    """One shard of a corpus and its position in it, small enough to send to another process."""

    number: int
    shard: Path
    first: int
    rows: int
    cuts: Cuts

    @property
    def here(self) -> slice:
        """Its documents among those of the whole corpus."""
        return slice(self.first, self.first + self.rows)

    def everyone(self, here: np.ndarray) -> np.ndarray:
        """`here` (bool [rows]) at the documents' indices in the whole corpus, up to the shard's end."""
        whole = np.zeros(self.here.stop, bool)  # untouched pages take no memory
        whole[self.here] = here
        return whole

    def identity(self) -> list[Any]:
        """What identifies the texts of this part: the inputs of a task that reads them."""
        return [self.shard.name, self.shard.stat().st_size, self.first, digest(*self.cuts)]


class Corpus:
    """All documents of `shards` in order. `columns` maps each column except the text to a numpy array [num_documents].

    `cuts` (one per shard) are applied to the texts on reading; the shards are not rewritten.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        self.shards = list(shards)
        schemas = [parquet.read_schema(shard) for shard in self.shards[:1]] or [schema()]
        self.sizes = [parquet.read_metadata(shard).num_rows for shard in self.shards]
        self.columns = Columns(self.shards, [name for name in schemas[0].names if name != "text"])
        self.cuts = [Cuts.none() for _ in self.shards]
        self._numbers = {shard: number for number, shard in enumerate(self.shards)}
        self._from = (0, 0)

    @classmethod
    def of(cls, part: Part) -> Corpus:
        """The part alone: shard number and document indices are those of the whole corpus; `columns` has only its own documents."""
        corpus = cls([part.shard])
        corpus.cuts = [part.cuts]
        corpus._from = (part.number, part.first)
        return corpus

    def parts(self) -> list[Part]:
        """All shards, each to be processed by any worker."""
        return [
            Part(number, shard, first, end - first, cuts)
            for (number, shard, first, end), cuts in zip(self.spans(), self.cuts)
        ]

    def cut(self, cuts: Sequence[Cuts]) -> None:
        """Leaves `cuts` (one per shard, as byte offsets in the current texts) out of the texts from here on and changes 'bytes'."""
        sizes = self.columns["bytes"].copy()
        for one in cuts:
            np.subtract.at(sizes, one.document, one.end - one.start - one.fill_bytes)
        self.columns.replace("bytes", sizes)
        self.cuts = [join(before, one) for before, one in zip(self.cuts, cuts)]

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.columns["bytes"].sum())

    def held(self, shard: Path, with_text: bool = False) -> Columns:
        """The columns of one shard alone, with ids as strings; `with_text`: its texts too."""
        return Columns([shard], [*self.columns, *(["text"] if with_text else [])], compact=False)

    def labels(self, name: str) -> Labels:
        """A column of texts as codes, read a shard at a time."""
        place: dict[str, int] = {}
        codes = np.zeros(len(self), np.int32)
        for _, shard, first, end in self.spans():
            column = parquet.read_table(shard, columns=[name]).column(0).combine_chunks().dictionary_encode()
            for chunk in [column] if isinstance(column, pa.DictionaryArray) else column.chunks:
                found = [place.setdefault(label, len(place)) for label in chunk.dictionary.to_pylist()]
                here = chunk.indices.to_numpy(zero_copy_only=False)
                codes[first : first + len(here)] = np.array(found, np.int32)[here]
                first += len(here)
            assert first == end, "a shard must have as many labels as documents"
        names = sorted(place)
        order = np.zeros(len(names), np.int32)
        order[[place[name] for name in names]] = np.arange(len(names), dtype=np.int32)
        return Labels(names, order[codes] if names else codes)

    def at(self, name: str, indices: Sequence[int]) -> dict[int, Any]:
        """{index: value of column `name`} for a few documents, without reading the whole column."""
        found = {}
        wanted = np.unique(np.asarray(indices, np.int64))
        for _, shard, first, end in self.spans():
            here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, end)]
            if len(here):
                column = parquet.read_table(shard, columns=[name]).column(0).take(pa.array(here - first))
                found.update(zip(here.tolist(), column.to_pylist()))
        return found

    def without(self, url_field: str, metadata_fields: Sequence[str]) -> list[tuple[str, str]]:
        """(option, name) of the requested fields that no document has; reads shard by shard until all are found.

        The default of `url_field` is left out, because the user did not ask for it.
        """
        left = [("metadata", "metadata_fields", name, f"{json.dumps(name)}:") for name in metadata_fields]
        left += [("url", "url_field", url_field, "")] if url_field not in ("", "url") else []
        for shard in self.shards:
            if not left:
                break
            table = parquet.read_table(shard, columns=sorted({column for column, *_ in left}))
            found = {  # the field's JSON key, whatever its value; any URL
                row: compute.any(
                    compute.match_substring(table.column(row[0]), row[3])
                    if row[3]
                    else compute.greater(compute.binary_length(table.column(row[0])), 0)
                ).as_py()
                for row in left
            }
            left = [row for row in left if not found[row]]
        return [(option, name) for _, option, name, _ in left]

    def spans(self) -> Iterator[tuple[int, Path, int, int]]:
        """(number, path, first, end) of each shard: it holds documents `first`..`end` of the corpus."""
        start, first = self._from
        for number, (shard, size) in enumerate(zip(self.shards, self.sizes), start):
            yield number, shard, first, first + size
            first += size

    def batches(self, shard: Path, first: int, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, Texts]]:
        """(indices int64 [k], their Texts) of the documents of `shard` where `chosen` (bool [num_documents]); `first` is the index of its first.

        A batch is a row group: about BATCH_BYTES, or one longer document. When all of it is chosen, no text is copied.
        """
        cuts = self.cuts[self._numbers[shard]]
        with parquet.ParquetFile(shard) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                wanted = np.flatnonzero(chosen[first : first + rows])
                if len(wanted):
                    column = file.read_row_group(group, columns=["text"]).column(0).combine_chunks()
                    array = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
                    texts = Texts.from_arrow(array if len(wanted) == rows else array.take(pa.array(wanted)))
                    yield wanted + first, apply_cuts(texts, wanted + first, cuts)
                first += rows

    def texts(self, shard: Path, first: int, chosen: np.ndarray) -> Iterator[tuple[int, str]]:
        """(index, text) of the same documents, one by one."""
        for indices, texts in self.batches(shard, first, chosen):
            yield from zip(indices.tolist(), texts.strings())

    def beginnings(self, indices: Sequence[int], num_chars: int) -> dict[int, str]:
        """{index: the first `num_chars` characters} of a few documents."""
        chosen = np.zeros(len(self), bool)
        chosen[list(indices)] = True
        shards = [(shard, first) for _, shard, first, end in self.spans() if chosen[first:end].any()]
        return {index: text[:num_chars] for at in shards for index, text in self.texts(*at, chosen)}
