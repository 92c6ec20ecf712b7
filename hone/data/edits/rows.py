"""Rows of hashes on disk: each shard's sorted by hash, gathered over all shards one range of hashes at a time."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.data.corpus import publish
from hone.data.edits.cuts import compiled

GATHERED_ROWS = 1 << 22
"""About how many rows of all shards are looked at together; a hash that stands in more rows than that is still one group."""


class Group(NamedTuple):
    """Rows that share their key with another row, sorted by key; then by `rank` of their document, then by place in it."""

    rows: np.ndarray
    shard: np.ndarray
    rank: np.ndarray


def save(path: Path, array: np.ndarray) -> None:
    """Writes `array` to `path`, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.save(file, array)
    publish(temporary, path)


def save_sorted(path: Path, rows: np.ndarray) -> None:
    """Writes a structured array sorted by its field `key` (uint64)."""
    save(path, rows[np.argsort(rows["key"])])


def repeated(
    paths: list[Path], rank: np.ndarray, firsts: np.ndarray, place: str, gathered_rows: int = GATHERED_ROWS
) -> Iterator[Group]:
    """The rows of all `paths`, one a shard, of keys that stand more than once, one range of keys after the other.

    Rows have the fields `key`, `document` (counted from firsts[shard]) and `place`, by which those of one document are
    ordered; `rank` int64 [num_documents] orders documents. Memory is bounded by `gathered_rows` unless single keys are more frequent than that.
    """
    shards = [np.load(path, mmap_mode="r") for path in paths]
    parts = max(1, -(-sum(map(len, shards)) // gathered_rows))
    borders = [part * 2**64 // parts for part in range(parts)] + [2**64]
    places = [
        [0, *(bisect.bisect_left(rows["key"], border) for border in borders[1:-1]), len(rows)] if len(rows) else None
        for rows in shards
    ]
    for part in range(parts):
        here = [(number, places[number]) for number in range(len(shards)) if places[number] is not None]
        slices = [shards[number][at[part] : at[part + 1]] for number, at in here]  # type: ignore[index]
        if not slices:
            continue
        rows = np.concatenate(slices)
        order = np.argsort(rows["key"])
        keys = rows["key"][order]
        same = keys[1:] == keys[:-1]
        twice = np.zeros(len(keys), bool)
        twice[1:] |= same
        twice[:-1] |= same
        picked = order[twice]
        numbers = np.array([number for number, _ in here])
        shard = np.repeat(numbers, [len(part) for part in slices])[picked]
        rows = rows[picked]
        ranked = rank[firsts[shard] + rows["document"]]
        order = compiled("sorting").within_groups(keys[twice], ranked, rows[place].astype(np.int64))
        yield Group(rows[order], shard[order], ranked[order])


def ranks(ids: np.ndarray) -> np.ndarray:
    """int64 [n]: each document's place when all are sorted by id; what 'first' means wherever copies are compared."""
    result = np.empty(len(ids), np.int64)
    result[np.argsort(ids, kind="stable")] = np.arange(len(ids))
    return result


_SPAN = np.dtype([("shard", np.int32), ("document", np.int32), ("start", np.int64), ("end", np.int64)])


def save_spans(path: Path, shard: np.ndarray, document: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Writes byte spans of many shards' documents, those of a shard together."""
    spans = np.empty(len(shard), _SPAN)
    spans["shard"], spans["document"], spans["start"], spans["end"] = shard, document, start, end
    save(path, spans[compiled("sorting").by_number(shard)])


def spans_of(paths: list[Path], shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, end), each int64, of the spans of `shard` in all `paths`."""
    found = [np.empty(0, _SPAN)]
    for path in paths:
        spans = np.load(path, mmap_mode="r")
        numbers = spans["shard"]
        found.append(spans[bisect.bisect_left(numbers, shard) : bisect.bisect_right(numbers, shard)])
    spans = np.concatenate(found)
    return spans["document"].astype(np.int64), spans["start"].copy(), spans["end"].copy()
