"""Keys of documents: files of numbers in the state folder, of the new documents and of earlier artifacts, and the column of hashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet

from hone.base.artifact import MANIFEST
from hone.base.durable import sha256, sync
from hone.base.errors import SpecError
from hone.data.corpus import Corpus, publish
from hone.data.executors.task import Task, contents, digest
from hone.text.batch import Texts

Sign = Callable[[Texts], tuple[np.ndarray, np.ndarray]]
"""Maps n texts to numbers (uint64 [width, n]) and whether each text is compared (bool [n])."""


def key_file(state: Path, number: int) -> Path:
    """The file that `sign_shards` writes for shard `number`."""
    return state / f"keys-{number:05d}.u64"


def sign_shards(
    corpus: Corpus, kept: np.ndarray, state: Path, width: int, sign: Sign, num_bytes: int = 1 << 22
) -> list[Path]:
    """Files of uint64 [1 + width, k], one per shard, written where missing: indices and numbers of its k kept documents that are compared.

    At most `num_bytes` of text, or one document, are processed at once.
    """
    paths = []
    for number, shard, first, _ in corpus.spans():
        paths.append(key_file(state, number))
        if paths[-1].exists():
            continue
        parts = [np.empty((1 + width, 0), np.uint64)]
        for indices, texts in corpus.batches(shard, first, kept):
            for begin, end in _slices(texts.offsets, num_bytes):
                numbers, takes_part = sign(Texts(texts.data, texts.offsets[begin : end + 1]))
                rows = np.vstack([indices[None, begin:end].astype(np.uint64), numbers])
                parts.append(rows[:, takes_part])
        save(paths[-1], np.concatenate(parts, 1))
    return paths


def _slices(offsets: np.ndarray, num_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive runs of texts of about `num_bytes`."""
    begin, last = 0, len(offsets) - 1
    while begin < last:
        end = int(np.searchsorted(offsets, offsets[begin] + num_bytes, "right")) - 1
        end = min(max(end, begin + 1), last)
        yield begin, end
        begin = end


def save(path: Path, array: np.ndarray) -> None:
    """Writes the raw numbers of `array`, row after row; after a kill the file is whole or missing."""
    temporary = path.with_suffix(".tmp")
    np.ascontiguousarray(array).tofile(temporary)
    publish(temporary, path)
    sync(path.parent)


def length(file: Path, num_rows: int) -> int:
    """Numbers in each of the `num_rows` rows of 64-bit numbers in `file`."""
    size = file.stat().st_size
    assert size % (8 * num_rows) == 0, f"{file} has {size} bytes, not {num_rows} rows of 64-bit numbers"
    return size // (8 * num_rows)


def gather(
    files: Sequence[Path], num_rows: int, begin: int, end: int, kind: type = np.int64
) -> tuple[np.ndarray, np.ndarray]:
    """(document indices `kind` [k], rows `begin`..`end` uint64 [end - begin, k]) of all files; row 0 holds the indices."""
    sizes = [length(file, num_rows) for file in files]
    indices, numbers = np.empty(sum(sizes), kind), np.empty((end - begin, sum(sizes)), np.uint64)
    done = 0
    for path, size in zip(files, sizes):
        with open(path, "rb") as file:
            indices[done : done + size] = np.fromfile(file, np.int64, size)
            file.seek(8 * size * begin)
            block = np.fromfile(file, np.uint64, (end - begin) * size)
            numbers[:, done : done + size] = block.reshape(end - begin, size)
        done += size
    return indices, numbers


class Numbers(NamedTuple):
    """Files of `sign_shards`, each with the indices of its documents and `width` rows of keys.

    `shifts`, when given, are added to the indices of each file. Sent to tasks, so small and picklable; as `Hashes` it has `sizes`, the number of
    keys of each piece, `content`, what identifies each piece (JSON), `part`, some of the pieces, and `read`: the documents
    (`kind` [n]) of all pieces, and rows `begin`..`end` of their keys (uint64 [end - begin, n]).
    """

    files: tuple[Path, ...]
    width: int
    shifts: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        return [length(file, 1 + self.width) for file in self.files]

    def content(self) -> list[Any]:
        rows = contents(self.files)
        return [[*row, shift] for row, shift in zip(rows, self.shifts)] if self.shifts else rows

    def part(self, begin: int, end: int) -> Numbers:
        return Numbers(self.files[begin:end], self.width, self.shifts[begin:end])

    def read(self, begin: int, end: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
        owners, numbers = gather(self.files, 1 + self.width, 1 + begin, 1 + end, kind)
        if self.shifts:
            owners += np.repeat(np.array(self.shifts, kind), self.sizes)
        return owners, numbers


class ComparedRows(NamedTuple):
    """The `count` documents of a shard that are compared: those whose bit is set in `chosen` (uint8). `first` is the index of its first document."""

    shard: Path
    first: int
    rows: int
    count: int
    chosen: np.ndarray


class Hashes(NamedTuple):
    """The column of hashes of some shards, read by the tasks that compare them: no process holds it for all documents."""

    pieces: tuple[ComparedRows, ...]

    @property
    def sizes(self) -> list[int]:
        return [piece.count for piece in self.pieces]

    def content(self) -> list[Any]:
        return [
            [piece.shard.name, piece.shard.stat().st_size, piece.first, piece.rows, digest(piece.chosen)]
            for piece in self.pieces
        ]

    def part(self, begin: int, end: int) -> Hashes:
        return Hashes(self.pieces[begin:end])

    def read(self, begin: int, end: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
        owners, numbers = np.empty(sum(self.sizes), kind), np.empty((1, sum(self.sizes)), np.uint64)
        done = 0
        for piece in self.pieces:
            chosen = np.unpackbits(piece.chosen, count=piece.rows).view(bool)
            hashes = parquet.read_table(piece.shard, columns=["text_hash"]).column(0).to_numpy()
            owners[done : done + piece.count] = np.flatnonzero(chosen) + piece.first
            numbers[0, done : done + piece.count] = hashes[chosen]
            done += piece.count
        return owners, numbers


KeySource = Numbers | Hashes
"""Where the keys of documents are: in files of their own, or a column of the shards."""


def record_of(folder: str) -> Path:
    """The file that identifies the data artifact in `folder`. Raises SpecError when there is none with documents."""
    path = Path(folder).expanduser().absolute()
    if not (path / MANIFEST).is_file() or not (path / "documents").is_dir():
        raise SpecError(
            f"dedup.against = '{folder}' is not a finished data artifact ({MANIFEST} and documents/)",
            fix="give the folder that an earlier hone data wrote",
        )
    return path / MANIFEST


class Earlier(NamedTuple):
    """A file of documents of an earlier artifact; `first` is the number of its first document, counted on from the new documents."""

    path: Path
    first: int
    rows: int
    record: str


def shards_of(folders: Sequence[str], first: int) -> list[Earlier]:
    """All files of documents of the artifacts in `folders`; document numbers begin at `first`."""
    found = []
    for folder in folders:
        record = record_of(folder)
        which = sha256(record)
        for path in sorted((record.parent / "documents").glob("*.parquet")):
            rows = parquet.read_metadata(path).num_rows
            found.append(Earlier(path, first, rows, which))
            first += rows
    return found


def sign_tasks(technique: Any, shards: Sequence[Earlier], state: Path) -> list[Task]:
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


def keys_of(shards: Sequence[Earlier], state: Path) -> list[Path]:
    """The files that the tasks of `sign_tasks` write."""
    return [state / f"earlier-{number:05d}.u64" for number in range(len(shards))]


def sign(folder: Path, technique: Any, shard: Path, name: str) -> dict[str, Any]:
    """Computes the keys of one file of documents into file `name` of `folder`."""
    corpus = Corpus([shard])
    (made,) = technique.prepare(corpus, np.ones(len(corpus), bool), folder)
    made.rename(folder / name)
    return {"rows": len(corpus)}


def ids_of(shards: Sequence[Earlier], numbers: np.ndarray) -> list[str]:
    """The ids of the documents with these numbers (int [k])."""
    ids = [""] * len(numbers)
    for shard in shards:
        here = np.flatnonzero((numbers >= shard.first) & (numbers < shard.first + shard.rows))
        if len(here):
            column = parquet.read_table(shard.path, columns=["id"]).column(0)
            for place, ident in zip(here.tolist(), column.take(numbers[here] - shard.first).to_pylist()):
                ids[place] = ident
    return ids


def source_of(technique: Any, corpus: Corpus, kept: np.ndarray, state: Path, earlier: Sequence[Earlier]) -> KeySource:
    """The keys of the documents where `kept` (bool [num_documents]), then those of `earlier`: what was signed, else the column of hashes."""
    if hasattr(technique, "prepare"):
        files = [key_file(state, number) for number, *_ in corpus.spans()]
        shifts = (*(0 for _ in files), *(shard.first for shard in earlier)) if earlier else ()
        return Numbers((*files, *keys_of(earlier, state)), technique.num_keys, shifts)
    pieces = [
        ComparedRows(shard, first, end - first, int(kept[first:end].sum()), np.packbits(kept[first:end]))
        for _, shard, first, end in corpus.spans()
    ]
    pieces += [
        ComparedRows(one.path, one.first, one.rows, one.rows, np.packbits(np.ones(one.rows, bool))) for one in earlier
    ]
    return Hashes(tuple(pieces))
