"""SimHash near-duplicate removal: 64-bit fingerprints that differ in few bits, found with tables of permuted blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.dedup.base import Joined, need_numba
from hone.data.dedup.earlier import Shard, counted, with_keys
from hone.text.batch import Texts

if TYPE_CHECKING:
    from hone.data.dedup.joining import Joining


class SimHash(Joined):
    """Drops documents whose 64-bit fingerprint is within a few bits of another's. Charikar 2002; Manku et al. 2007.

    Smaller than MinHash (8 bytes per document against 112), but 3 bits find only nearly equal documents: most
    of Jaccard similarity above .95, a sixth of those from .8 to .95. It does not replace MinHash.
    """

    paper: ClassVar[str] = "doi:10.1145/1242572.1242592"
    reason: ClassVar[str] = "near_duplicate_fingerprint"
    shingle_words: int = Field(3, ge=1, description="Words per shingle.")
    distance: int = Field(3, ge=0, le=7, description="Most bits in which the fingerprints of duplicates may differ.")

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        return kept

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> list[Path]:
        """Files of the fingerprints of each shard of `corpus`, computed where they are missing."""
        need_numba()
        from hone.data.dedup import shards

        return shards.sign_shards(corpus, chosen, state, "fingerprints", 1, self.fingerprints)

    def joining(self, corpus: Corpus, kept: np.ndarray, state: Path, earlier: Sequence[Shard] = ()) -> Joining:
        from hone.data.dedup.joining import Joining, Numbers

        files = [state / f"fingerprints-{number:05d}.u64" for number, *_ in corpus.spans()]
        source = Numbers(*with_keys(files, earlier, state, 1))
        return Joining(source, Near.of(sum(source.sizes), self.distance), state, counted(corpus, earlier))

    def fingerprints(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Fingerprints of n texts (uint64 [1, n]) and which texts have a word (bool [n])."""
        from hone.text.dedup.signing import fingerprints

        found, worded = fingerprints(texts.data, texts.offsets, self.shingle_words, self._table)
        return found[None], worded

    @cached_property
    def _table(self) -> Any:
        from hone.text.units import unit_table

        return unit_table()


class Near(NamedTuple):
    """Joins documents whose fingerprints differ in at most `distance` bits.

    The 64 bits are cut into distance + c blocks; two such fingerprints agree in at least c blocks, so a table keyed by
    each choice of c blocks finds each pair. c grows with the number of fingerprints, so that few pairs agree by chance.
    `masks` holds the bits of each table's key; equal fingerprints share the key of every table.
    """

    distance: int
    masks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_fingerprints: int, distance: int) -> Near:
        """The tables for `num_fingerprints`."""
        return cls(distance, tuple(map(tuple, masks(num_fingerprints, distance))))

    @property
    def num_tables(self) -> int:
        return max(len(self.masks), 1)

    def row(self, table: int) -> int:
        return 0

    def heads(self, numbers: np.ndarray, table: int) -> np.ndarray:
        from hone.text.dedup.bits import gather_bits

        if not self.masks:
            return numbers
        mask = np.array(self.masks[table], np.int64)
        return gather_bits(numbers, mask) << np.uint64(64 - len(mask))

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None:
        from hone.text.dedup import union_find
        from hone.text.dedup.bits import join_near
        from hone.text.dedup.equal_numbers import join_equal

        same, places = union_find.singles(len(numbers)), union_find.singles(len(numbers))
        join_equal(same, numbers)
        union_find.join(parents, places, same)
        if self.masks:  # one of each group of equal ones is compared with the others: comparing all would be quadratic
            places = places[same == places]
            keys = self.heads(numbers[places], table)
            order = np.argsort(keys)
            join_near(parents, places[order], numbers[places[order]], keys[order], self.distance)


def masks(num_fingerprints: int, distance: int) -> Iterator[list[int]]:
    """Bit numbers of each table's key. No table for a distance of 0: equal fingerprints are joined without."""
    if distance == 0:
        return
    chosen = 1
    while 64 * chosen / (distance + chosen) < np.log2(num_fingerprints + 1) and chosen < 4:
        chosen += 1
    num_blocks = distance + chosen
    borders = [64 * block // num_blocks for block in range(num_blocks + 1)]
    for blocks in itertools.combinations(range(num_blocks), chosen):
        yield [bit for block in blocks for bit in range(borders[block], borders[block + 1])]
