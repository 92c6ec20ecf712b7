"""SimHash near-duplicate removal: 64-bit fingerprints that differ in few bits, found through tables of permuted blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.dedup.base import Dedup, lowest_ids, need_numba
from hone.data.text.batch import Texts


class SimHash(Dedup):
    """Drops documents whose 64-bit fingerprint is within a few bits of another's. Charikar 2002; Manku et al. 2007.

    Smaller than MinHash (8 bytes a document against 112), but 3 bits only find documents that are nearly the same: most
    of Jaccard similarity above .95, a sixth of those from .8 to .95. It does not replace MinHash.
    """

    paper: ClassVar[str] = "doi:10.1145/1242572.1242592"
    reason: ClassVar[str] = "near_duplicate_fingerprint"
    shingle_words: int = Field(3, ge=1, description="Words a shingle.")
    distance: int = Field(3, ge=0, le=7, description="Most bits in which fingerprints of duplicates differ.")

    def takes_part(self, corpus: Corpus, alive: np.ndarray) -> np.ndarray:
        return alive

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> list[Path]:
        """Files of the fingerprints of each shard of `corpus`, made unless they are there."""
        need_numba()
        from hone.data.dedup import shards

        return shards.sign_shards(corpus, chosen, state, "fingerprints", 1, self.fingerprints)

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        files = self.prepare(corpus, alive, state)
        from hone.data.dedup import shards, union_find

        indices, fingerprints = shards.gather(files, 2, 1)
        parents = union_find.singles(len(alive))
        connect(parents, indices, fingerprints, self.distance)
        union_find.flatten(parents)
        return lowest_ids(parents, corpus.columns["id"])

    def fingerprints(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Fingerprints of n texts (uint64 [1, n]) and which texts have a word at all (bool [n])."""
        from hone.data.dedup.signing import fingerprints

        found, worded = fingerprints(texts.data, texts.offsets, self.shingle_words, self._table)
        return found[None], worded

    @cached_property
    def _table(self) -> Any:
        from hone.data.text.hashing import word_table

        return word_table()


def connect(parents: np.ndarray, indices: np.ndarray, fingerprints: np.ndarray, distance: int) -> None:
    """Joins in `parents` all `indices` (int64 [k]) whose `fingerprints` (uint64 [k]) differ in at most `distance` bits.

    The 64 bits are cut into distance + c blocks; two fingerprints so near agree in some c blocks, so a table sorted by
    each choice of c blocks brings each pair together. c grows with k until chance neighbours are few.
    """
    from hone.data.dedup import union_find
    from hone.data.dedup.bits import gather_bits, join_near

    order = np.argsort(fingerprints)
    indices, fingerprints = indices[order], fingerprints[order]
    fresh = np.ones(len(indices), bool)
    fresh[1:] = fingerprints[1:] != fingerprints[:-1]
    union_find.join(parents, indices[:-1][~fresh[1:]], indices[1:][~fresh[1:]])
    indices, fingerprints = indices[fresh], fingerprints[fresh]
    for mask in masks(len(indices), distance):
        keys = gather_bits(fingerprints, np.array(mask, np.int64))
        order = np.argsort(keys)
        join_near(parents, indices[order], fingerprints[order], keys[order], distance)


def masks(num_fingerprints: int, distance: int) -> Iterator[list[int]]:
    """Bit numbers of each table's key. None for a distance of 0: equal fingerprints need no table."""
    if distance == 0:
        return
    chosen = 1
    while 64 * chosen / (distance + chosen) < np.log2(num_fingerprints + 1) and chosen < 4:
        chosen += 1
    num_blocks = distance + chosen
    borders = [64 * block // num_blocks for block in range(num_blocks + 1)]
    for blocks in itertools.combinations(range(num_blocks), chosen):
        yield [bit for block in blocks for bit in range(borders[block], borders[block + 1])]
