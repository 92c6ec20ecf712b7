"""An index of the n-grams of examples, and the pairs of example and document that hits in documents make."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hone.text.batch import Texts
from hone.text.contamination.match import grams_of, hits_of, table_of
from hone.text.units import unit_table

HIT = np.dtype([("key", np.uint64), ("document", np.int64), ("start", np.int64), ("end", np.int64)])
"""Words of a document that are an n-gram of an example: its key, and bytes of the document's text."""
PAIR = np.dtype([("example", np.int64), ("document", np.int64), ("hit", np.int64)])


class Index(NamedTuple):
    """The n-grams of the examples. `keys` uint64 [n] sorted; n-gram i is in examples owners[first[i]:first[i + 1]].

    `lengths` are the n that occur; `num_grams` int64 [num_examples] is 0 for examples too short to search for.
    """

    keys: np.ndarray
    first: np.ndarray
    owners: np.ndarray
    lengths: np.ndarray
    num_grams: np.ndarray


def index_of(texts: Texts, owner: np.ndarray, num_examples: int, words: int, shortest: int) -> Index:
    """The n-grams of `words` words of `texts`, of which text i is one of example owner[i] (int [num_texts]).

    A text of fewer words is an n-gram as a whole if it has `shortest`.
    """
    text, key, lengths = grams_of(*texts, words, shortest, unit_table())
    owner = owner[text]
    order = np.lexsort((owner, key))
    key, owner = key[order], owner[order]
    fresh = np.ones(len(key), bool)
    fresh[1:] = (key[1:] != key[:-1]) | (owner[1:] != owner[:-1])
    key, owner = key[fresh], owner[fresh]
    keys, first = np.unique(key, return_index=True)
    num_grams = np.bincount(owner, minlength=num_examples)
    return Index(keys, np.append(first, len(key)), owner, np.unique(lengths), num_grams)


def finder(index: Index) -> Callable[[np.ndarray, Texts], np.ndarray]:
    """A function of documents' indices (int [num_texts]) and Texts that finds the hits (HIT [k]) of `index` in them."""
    table, bits = table_of(index.keys)

    def find(indices: np.ndarray, texts: Texts) -> np.ndarray:
        text, start, end, key = hits_of(*texts, index.lengths, table, bits, unit_table())
        return hits(indices[text], start, end, key)

    return find


def hits(document: np.ndarray, start: np.ndarray, end: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The columns as HIT [k]."""
    rows = np.empty(len(document), HIT)
    rows["document"], rows["start"], rows["end"], rows["key"] = document, start, end, key
    return rows


def uncommon(found: np.ndarray, max_documents: int | None) -> np.ndarray:
    """Hits (HIT [k]) without those of keys that are in more than `max_documents` documents."""
    if max_documents is None or not len(found):
        return found
    seen = np.unique(found[["key", "document"]])
    keys, counts = np.unique(seen["key"], return_counts=True)
    return found[counts[np.searchsorted(keys, found["key"])] <= max_documents]


def pairs_of(index: Index, hits: np.ndarray) -> np.ndarray:
    """Every (example, document) with a hit once, with the number of its first hit; structured int64."""
    rows = np.searchsorted(index.keys, hits["key"])
    counts = index.first[rows + 1] - index.first[rows]
    pairs = np.empty(counts.sum(), PAIR)
    skipped = np.cumsum(counts) - counts
    pairs["example"] = index.owners[np.arange(len(pairs)) + np.repeat(index.first[rows] - skipped, counts)]
    pairs["document"], pairs["hit"] = np.repeat(hits["document"], counts), np.repeat(np.arange(len(hits)), counts)
    pairs = np.sort(pairs, order=("example", "document", "hit"))
    fresh = np.ones(len(pairs), bool)
    fresh[1:] = (np.diff(pairs["example"]) != 0) | (np.diff(pairs["document"]) != 0)
    return pairs[fresh]
