"""Files of numbers per document in the state folder, each whole or absent, so that a killed run resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import sha256, sync
from hone.data.corpus import Corpus
from hone.data.executors.task import written
from hone.text.batch import Texts

Sign = Callable[[Texts], tuple[np.ndarray, np.ndarray]]
"""Maps n texts to numbers (uint64 [width, n]) and whether each text is compared (bool [n])."""


def sign_shards(
    corpus: Corpus, kept: np.ndarray, state: Path, name: str, width: int, sign: Sign, num_bytes: int = 1 << 22
) -> list[Path]:
    """Files of uint64 [1 + width, k], one per shard: indices and numbers of its k kept documents that are compared."""
    return [sign_shard(corpus, span, kept, state, name, width, sign, num_bytes) for span in corpus.spans()]


def sign_shard(
    corpus: Corpus,
    span: tuple[int, Path, int, int],
    kept: np.ndarray,
    state: Path,
    name: str,
    width: int,
    sign: Sign,
    num_bytes: int = 1 << 22,
) -> Path:
    """One shard's file, written if missing. At most `num_bytes` of text, or one document, are processed at once."""
    number, shard, first, _ = span
    path = state / f"{name}-{number:05d}.u64"
    if not path.exists():
        parts = [np.empty((1 + width, 0), np.uint64)]
        for indices, texts in corpus.batches(shard, first, kept):
            for begin, end in _slices(texts.offsets, num_bytes):
                numbers, takes_part = sign(Texts(texts.data, texts.offsets[begin : end + 1]))
                rows = np.vstack([indices[None, begin:end].astype(np.uint64), numbers])
                parts.append(rows[:, takes_part])
        save(path, np.concatenate(parts, 1))
    return path


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
    with open(temporary, "wb") as file:
        np.ascontiguousarray(array).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def length(file: Path, num_rows: int) -> int:
    """Numbers in each of the `num_rows` rows of 64-bit numbers in `file`."""
    size = file.stat().st_size
    assert size % (8 * num_rows) == 0, f"{file} has {size} bytes, not {num_rows} rows of 64-bit numbers"
    return size // (8 * num_rows)


def contents(files: Sequence[Path]) -> list[list[Any]]:
    """[name, bytes, hash] of each file, from its task's manifest where there is one, else by reading it."""
    known: dict[str, dict[str, Any]] = {}
    for folder in {file.parent for file in files}:
        known |= {f"{folder / name}": row for name, row in written(folder).items()}
    rows = []
    for file in files:
        size, row = file.stat().st_size, known.get(f"{file}")
        hashed = row["hash"] if row and row["bytes"] == size else sha256(file)
        rows.append([file.name, size, hashed])
    return rows


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
