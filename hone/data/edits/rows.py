"""Rows of hashes on disk: sorted by hash per shard, gathered over all shards one range of hashes at a time."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.data.corpus import publish
from hone.data.edits.cuts import compiled

GATHERED_ROWS = 1 << 22
"""About how many rows of all shards are in memory together; the rows of one hash are always one group, even if more."""


class Group(NamedTuple):
    """Rows whose key occurs more than once, sorted by `key`, then `rank` of the document, then place in the document."""

    key: np.ndarray
    rows: np.ndarray
    shard: np.ndarray
    rank: np.ndarray


def save(path: Path, array: np.ndarray) -> None:
    """Writes `array` to `path`, atomically."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.save(file, array)
    publish(temporary, path)


def save_sorted(path: Path, keys: np.ndarray, rows: np.ndarray) -> None:
    """Writes `rows` (structured [n]) to `path` and `keys` (uint64 [n]) beside it, both sorted by the high bits of the keys."""
    order, _ = _order(keys)
    save(path.with_suffix(".keys"), keys.take(order))
    save(path, rows.take(order))


def _order(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(order, high bits): the order of `keys` by as many high bits as leave room for row indices below them, and those bits.

    Sorting the numbers is several times as fast as argsort.
    """
    bits = np.uint64(len(keys).bit_length())
    packed = keys >> bits << bits | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed & np.uint64((1 << int(bits)) - 1)).astype(np.int64), packed >> bits


def repeated(
    paths: list[Path], rank: np.ndarray, firsts: np.ndarray, place: str, gathered_rows: int = GATHERED_ROWS
) -> Iterator[Group]:
    """The rows of all `paths` (one per shard) whose keys occur more than once, one range of keys after the other.

    Rows have the fields `document` (index minus firsts[shard]) and `place`, the order within a document;
    `rank` int64 [num_documents] orders documents. Memory is bounded by `gathered_rows` unless a single key is more frequent
    than that. Rows of a unique key are returned in rare cases.
    """
    keys = [np.load(path.with_suffix(".keys"), mmap_mode="r") for path in paths]
    rows = [np.load(path, mmap_mode="r") for path in paths]
    # Powers of two, so that a range is a value of the high bits by which shards are sorted.
    parts = 1 << (sum(map(len, rows)) // gathered_rows).bit_length()
    borders = [part * 2**64 // parts for part in range(1, parts)]
    places = [[0, *(bisect.bisect_left(part, border) for border in borders), len(part)] for part in keys]
    for part in range(parts):
        here = [slice(at[part], at[part + 1]) for at in places]
        key = np.concatenate([np.empty(0, np.uint64), *(one[at] for one, at in zip(keys, here))])
        order, high = _order(key)
        same = high[1:] == high[:-1]
        twice = np.zeros(len(key), bool)
        twice[1:] |= same
        twice[:-1] |= same
        picked = order[twice]
        if not len(picked):
            continue
        shard = np.repeat(np.arange(len(here)), [at.stop - at.start for at in here])[picked]
        some, key = np.concatenate([one[at] for one, at in zip(rows, here)]).take(picked), key.take(picked)
        ranked = rank[firsts[shard] + some["document"]]
        order = compiled("hone.text.edits.sorting").within_groups(
            high[twice], key, ranked, some[place].astype(np.int64)
        )
        yield Group(key.take(order), some.take(order), shard.take(order), ranked.take(order))


def ranks(ids: np.ndarray) -> np.ndarray:
    """int64 [n]: each document's rank by id; the 'first' of several copies is the one of lowest rank."""
    result = np.empty(len(ids), np.int64)
    result[np.argsort(ids, kind="stable")] = np.arange(len(ids))
    return result


_SPAN = np.dtype([("shard", np.int32), ("document", np.int32), ("start", np.int64), ("end", np.int64)])


def save_spans(path: Path, shard: np.ndarray, document: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Writes byte spans of documents of many shards, grouped by shard."""
    spans = np.empty(len(shard), _SPAN)
    spans["shard"], spans["document"], spans["start"], spans["end"] = shard, document, start, end
    save(path, spans.take(np.argsort(shard, kind="stable")))


def spans_of(paths: Sequence[Path], shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, end), each int64, of the spans of `shard` in all `paths`."""
    found = [np.empty(0, _SPAN)]
    for path in paths:
        spans = np.load(path, mmap_mode="r")
        numbers = spans["shard"]
        found.append(spans[bisect.bisect_left(numbers, shard) : bisect.bisect_right(numbers, shard)])
    spans = np.concatenate(found)
    return spans["document"].astype(np.int64), spans["start"].copy(), spans["end"].copy()
