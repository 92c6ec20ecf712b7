"""Cuts: byte spans to leave out of documents, or to write something else for; the texts on disk are not rewritten."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from hone.base.errors import MissingExtra
from hone.text.batch import Texts

_PLACE_BITS = 36


class Cuts(NamedTuple):
    """k byte spans to cut out of the documents of one shard, sorted by document and start; they do not overlap, and those
    without a fill do not touch.

    `document` int64 [k] is the index in the corpus, `start` and `end` int64 [k] are bytes of that document's text. `fill`
    bytes [k] (numpy S) is what is written in the place of each span, UTF-8, nothing for most.
    """

    document: np.ndarray
    start: np.ndarray
    end: np.ndarray
    fill: np.ndarray

    @classmethod
    def none(cls) -> Cuts:
        """No cuts."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, "S1"))

    @classmethod
    def plain(cls, document: np.ndarray, start: np.ndarray, end: np.ndarray) -> Cuts:
        """Cuts in whose place nothing is written; the arrays are sorted and apart already."""
        return cls(document, start, end, np.zeros(len(document), "S1"))

    @classmethod
    def of(cls, document: np.ndarray, start: np.ndarray, end: np.ndarray, fill: np.ndarray | None = None) -> Cuts:
        """The cuts of any spans of one shard, in any order: empty ones are left out, overlapping ones merged.

        Of spans that overlap, the fill of the one that is last in the given order is written.
        """
        fill = np.zeros(len(document), "S1") if fill is None else fill
        full = end > start
        document, start, end = (np.asarray(part)[full].astype(np.int64) for part in (document, start, end))
        fill = fill[full]
        if not len(document):
            return cls.none()
        base = document.min()
        order = np.argsort(_key(document - base, start), kind="stable")
        document, start, end, fill = document[order], start[order], end[order], fill[order]
        begin = _key(document - base, start)[1:]
        reach = np.maximum.accumulate(_key(document - base, end))
        bare = np.char.str_len(fill) == 0
        fresh = np.concatenate([[True], (begin > reach[:-1]) | ((begin == reach[:-1]) & ~(bare[1:] & bare[:-1]))])
        first = np.flatnonzero(fresh)
        last = np.append(first[1:], len(fresh)) - 1
        latest = order == np.repeat(np.maximum.reduceat(order, first), last - first + 1)
        return cls(document[first], start[first], reach[last] & ((1 << _PLACE_BITS) - 1), fill[latest])

    @property
    def fill_bytes(self) -> np.ndarray:
        """int64 [k]: bytes that are written in the place of each span."""
        return np.char.str_len(self.fill).astype(np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes that are cut, also those in whose place others are written."""
        return int((self.end - self.start).sum())


def _key(document: np.ndarray, place: np.ndarray) -> np.ndarray:
    """int64 keys that sort by (document, place)."""
    assert not len(document) or (document.max() < 1 << 27 and place.max() < 1 << _PLACE_BITS), "the shard is too large"
    return document << _PLACE_BITS | place


def join(earlier: Cuts, later: Cuts) -> Cuts:
    """One Cuts of a shard with the effect of `earlier` and then `later`, whose offsets are in the texts after `earlier`.

    A later span that covers a part of what an earlier one has written covers all of it.
    """
    if not len(earlier.document) or not len(later.document):
        return later if len(later.document) else earlier
    base = min(earlier.document[0], later.document[0])
    written = earlier.fill_bytes
    total = np.concatenate([[0], np.cumsum(earlier.end - earlier.start - written)])
    first = np.searchsorted(earlier.document, earlier.document)  # for each cut, the first one of its document
    gone = total[:-1] - total[first]
    places = _key(earlier.document - base, earlier.start - gone)

    def original(place: np.ndarray, edge: np.ndarray) -> np.ndarray:
        """The offset of byte `place` of each of later's documents before `earlier` was applied; `edge` where that byte was written
        by a span of `earlier`."""
        passed = np.searchsorted(places, _key(later.document - base, place), side="right")
        known = np.searchsorted(earlier.document, later.document)
        before = place + total[passed] - total[known]
        span = np.maximum(passed - 1, 0)
        inside = (passed > known) & (place - (earlier.start - gone)[span] < written[span])
        return np.where(inside, edge[span], before)

    start = original(later.start, earlier.start)
    end = original(later.end - 1, earlier.end - 1) + 1
    parts = (np.concatenate(pair) for pair in zip(earlier, (later.document, start, end, later.fill)))
    return Cuts.of(*parts)


def apply_cuts(texts: Texts, documents: np.ndarray, cuts: Cuts) -> Texts:
    """`texts` without the bytes of `cuts`, their fills in their places; text i is document `documents[i]` (int64 [n], ascending) of the corpus.

    Cuts of other documents are ignored. When no cut applies, `texts` itself is returned.
    """
    low, high = np.searchsorted(cuts.document, [documents[0], documents[-1] + 1]) if len(documents) else (0, 0)
    if low == high:
        return texts
    document, start, end, fill = (part[low:high] for part in cuts)
    fills = np.frombuffer(fill.tobytes(), np.uint8).reshape(len(fill), fill.dtype.itemsize)
    written = np.char.str_len(fill).astype(np.int64)
    data, offsets = compiled("hone.text.edits.spans").without(*texts, documents, document, start, end, fills, written)
    return Texts(data, offsets)


def cut_whole(cuts: Cuts, documents: np.ndarray, sizes: np.ndarray, min_left_bytes: int) -> Cuts:
    """`cuts`, extended to whole documents where a cut would leave less than `min_left_bytes`.

    `documents` int64 [n], ascending, are the compared ones of the shard; `sizes` int64 [n] their bytes.
    """
    touched, first = np.unique(cuts.document, return_index=True)
    lost = cuts.end - cuts.start - cuts.fill_bytes
    gone = np.add.reduceat(lost, first) if len(first) else np.empty(0, np.int64)
    whole = sizes[np.searchsorted(documents, touched)]
    short = whole - gone < min_left_bytes
    keep = ~np.isin(cuts.document, touched[short])
    parts = (touched[short], np.zeros(short.sum(), np.int64), whole[short], np.zeros(short.sum(), "S1"))
    return Cuts.of(*(np.concatenate([part[keep], more]) for part, more in zip(cuts, parts)))


def figures(cuts: Sequence[Cuts]) -> dict[str, int]:
    """Totals of the cuts of all shards: spans, bytes, documents that are cut."""
    return {
        "cuts": sum(len(shard.document) for shard in cuts),
        "cut_bytes": sum(shard.num_bytes for shard in cuts),
        "cut_documents": sum(len(np.unique(shard.document)) for shard in cuts),
    }


def compiled(module: str, what: str = "cutting repeats out of documents") -> ModuleType:
    """A module of compiled kernels, by its whole name, for `what`. Raises MissingExtra without numba."""
    MissingExtra.need(what, "numba", "data")
    return importlib.import_module(module)
