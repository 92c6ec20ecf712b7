"""Small arrays of numbers per document in state files: each is whole or absent, so a killed run goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hone.base.durable import sync
from hone.data.corpus import Corpus
from hone.data.text.batch import Texts

_HELD = 1 << 20
"""Numbers, with the documents they belong to, that are gathered before they are sent to their ranges."""
Sign = Callable[[Texts], tuple[np.ndarray, np.ndarray]]
"""From n texts to numbers (uint64 [width, n]) and whether each text takes part (bool [n])."""


def sign_shards(
    corpus: Corpus, alive: np.ndarray, state: Path, name: str, width: int, sign: Sign, num_bytes: int = 1 << 22
) -> list[Path]:
    """Files of uint64 [1 + width, k], a shard each: for its k living documents that take part the indices, then the numbers."""
    return [sign_shard(corpus, span, alive, state, name, width, sign, num_bytes) for span in corpus.spans()]


def sign_shard(
    corpus: Corpus,
    span: tuple[int, Path, int, int],
    alive: np.ndarray,
    state: Path,
    name: str,
    width: int,
    sign: Sign,
    num_bytes: int = 1 << 22,
) -> Path:
    """One shard's file; made only when it is not there. At most `num_bytes` of text, or one document, are signed at once."""
    number, shard, first, _ = span
    path = state / f"{name}-{number:05d}.u64"
    if not path.exists():
        parts = [np.empty((1 + width, 0), np.uint64)]
        for indices, texts in corpus.batches(shard, first, alive):
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
    """Writes the bare numbers of `array`, row after row, so that a kill leaves the whole file or none."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.ascontiguousarray(array).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def length(file: Path, num_rows: int) -> int:
    """Numbers in each of the `num_rows` rows of 64 bits that `file` holds."""
    size = file.stat().st_size
    assert size % (8 * num_rows) == 0, f"{file} has {size} bytes, which are not {num_rows} rows of 64-bit numbers"
    return size // (8 * num_rows)


def gather(files: list[Path], num_rows: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(document indices int64 [k], numbers uint64 [k]) of `row` of all files."""
    indices, numbers = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for file in files:
        owners, values = _row(file, num_rows, row)
        indices.append(owners)
        numbers.append(values)
    return np.concatenate(indices), np.concatenate(numbers)


def ranges(files: list[Path], num_rows: int, row: int, bits: int, folder: Path) -> list[Path]:
    """The same cut into 2^bits ranges by the numbers' first bits: a file in `folder` each, as `load_range` reads it.

    Every file is read once; memory is _HELD pairs, whatever the number of files.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / f"range-{part:05d}.u64" for part in range(1 << bits)]
    for path in paths:
        path.write_bytes(b"")
    waiting: list[np.ndarray] = []
    held = 0
    for number, file in enumerate(files, 1):
        owners, values = _row(file, num_rows, row)
        waiting.append(np.stack([values, owners.astype(np.uint64)], 1))
        held += len(values)
        if held >= _HELD or number == len(files):
            pairs = np.concatenate(waiting)
            parts = pairs[:, 0] >> np.uint64(64 - bits)
            pairs = pairs[np.argsort(parts, kind="stable")]
            borders = np.concatenate([[0], np.cumsum(np.bincount(parts.astype(np.int64), minlength=len(paths)))])
            for path, begin, end in zip(paths, borders[:-1], borders[1:]):
                if end > begin:
                    with open(path, "ab") as out:
                        pairs[begin:end].tofile(out)
            waiting, held = [], 0
    return paths


def load_range(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(document indices int64 [k], numbers uint64 [k]) of a range."""
    pairs = np.fromfile(path, np.uint64).reshape(-1, 2)
    return pairs[:, 1].astype(np.int64), pairs[:, 0].copy()


def _row(file: Path, num_rows: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    count = length(file, num_rows)
    return np.fromfile(file, np.int64, count), np.fromfile(file, np.uint64, count, offset=8 * count * row)
