"""Cuts: byte spans to leave out of documents; the texts on disk are not rewritten."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from hone.base.errors import MissingExtra
from hone.data.text.batch import Texts

_PLACE_BITS = 36


class Cuts(NamedTuple):
    """k byte spans to cut out of the documents of one shard, sorted by document and start; they neither overlap nor touch.

    `document` int64 [k] is the index in the corpus, `start` and `end` int64 [k] are bytes of that document's text.
    """

    document: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @classmethod
    def none(cls) -> Cuts:
        """No cuts."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, document: np.ndarray, start: np.ndarray, end: np.ndarray) -> Cuts:
        """The cuts of any spans of one shard, in any order: empty ones are left out, overlapping ones merged."""
        full = end > start
        document, start, end = (np.asarray(part)[full].astype(np.int64) for part in (document, start, end))
        if not len(document):
            return cls.none()
        base = document.min()
        order = np.argsort(_key(document - base, start), kind="stable")
        document, start, end = document[order], start[order], end[order]
        reach = np.maximum.accumulate(_key(document - base, end))
        fresh = np.concatenate([[True], _key(document - base, start)[1:] > reach[:-1]])
        last = np.concatenate([np.flatnonzero(fresh)[1:], [len(fresh)]]) - 1
        return cls(document[fresh], start[fresh], reach[last] & ((1 << _PLACE_BITS) - 1))

    @property
    def num_bytes(self) -> int:
        """Bytes that are cut."""
        return int((self.end - self.start).sum())


def _key(document: np.ndarray, place: np.ndarray) -> np.ndarray:
    """int64 keys that sort by (document, place)."""
    assert not len(document) or (document.max() < 1 << 27 and place.max() < 1 << _PLACE_BITS), "the shard is too large"
    return document << _PLACE_BITS | place


def join(earlier: Cuts, later: Cuts) -> Cuts:
    """One Cuts of a shard with the effect of `earlier` and then `later`, whose offsets are in the texts after `earlier`."""
    if not len(earlier.document) or not len(later.document):
        return later if len(later.document) else earlier
    base = min(earlier.document[0], later.document[0])
    sizes = earlier.end - earlier.start
    total = np.concatenate([[0], np.cumsum(sizes)])
    first = np.searchsorted(earlier.document, earlier.document)  # for each cut, the first one of its document
    gone = total[:-1] - total[first]
    places = _key(earlier.document - base, earlier.start - gone)

    def original(place: np.ndarray) -> np.ndarray:
        """The offset of byte `place` of each of later's documents before `earlier` was applied."""
        passed = np.searchsorted(places, _key(later.document - base, place), side="right")
        return place + total[passed] - total[np.searchsorted(earlier.document, later.document)]

    start, end = original(later.start), original(later.end - 1) + 1
    return Cuts.of(*(np.concatenate(pair) for pair in zip(earlier, (later.document, start, end))))


def apply_cuts(texts: Texts, documents: np.ndarray, cuts: Cuts) -> Texts:
    """`texts` without the bytes of `cuts`; text i is document `documents[i]` (int64 [n], ascending) of the corpus.

    Cuts of other documents are ignored. When no cut applies, `texts` itself is returned.
    """
    low, high = np.searchsorted(cuts.document, [documents[0], documents[-1] + 1]) if len(documents) else (0, 0)
    if low == high:
        return texts
    data, offsets = compiled("spans").without(texts.data, texts.offsets, documents, *(part[low:high] for part in cuts))
    return Texts(data, offsets)


def cut_whole(cuts: Cuts, documents: np.ndarray, sizes: np.ndarray, min_left_bytes: int) -> Cuts:
    """`cuts`, extended to whole documents where a cut would leave less than `min_left_bytes`.

    `documents` int64 [n], ascending, are the compared ones of the shard; `sizes` int64 [n] their bytes.
    """
    touched, first = np.unique(cuts.document, return_index=True)
    gone = np.add.reduceat(cuts.end - cuts.start, first) if len(first) else np.empty(0, np.int64)
    whole = sizes[np.searchsorted(documents, touched)]
    short = whole - gone < min_left_bytes
    keep = ~np.isin(cuts.document, touched[short])
    parts = (touched[short], np.zeros(short.sum(), np.int64), whole[short])
    return Cuts.of(*(np.concatenate([part[keep], more]) for part, more in zip(cuts, parts)))


def figures(cuts: Sequence[Cuts]) -> dict[str, int]:
    """Totals of the cuts of all shards: spans, bytes, documents that are cut."""
    return {
        "cuts": sum(len(shard.document) for shard in cuts),
        "cut_bytes": sum(shard.num_bytes for shard in cuts),
        "cut_documents": sum(len(np.unique(shard.document)) for shard in cuts),
    }


def compiled(module: str) -> ModuleType:
    """The module of this folder with compiled kernels. Raises MissingExtra without numba."""
    try:
        return importlib.import_module(f"hone.data.edits.{module}")
    except ImportError as error:
        if error.name != "numba":
            raise
        raise MissingExtra.of("cutting repeats out of documents", "numba", "data") from None
