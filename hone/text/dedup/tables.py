"""Tables of keys: which documents are joined, by equal keys or by fingerprints that differ in few bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from hone.text.dedup import union_find
from hone.text.dedup.union_find import gather_bits, join_equal, join_near


class Rule(Protocol):
    """Which documents are joined; methods as in `Equal`."""

    @property
    def num_tables(self) -> int: ...

    def row(self, table: int) -> int: ...

    def heads(self, numbers: np.ndarray, table: int) -> np.ndarray: ...

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None: ...


class Equal(NamedTuple):
    """Joins documents whose keys in a row are equal; each row is a table."""

    num_tables: int

    def row(self, table: int) -> int:
        """The row of keys of a table."""
        return table

    def heads(self, numbers: np.ndarray, table: int) -> np.ndarray:
        """Numbers (uint64 [n], evenly distributed) by which a table is split into ranges; equal for documents to be joined."""
        return numbers

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None:
        """Joins in `parents` [n] the indices of documents to be joined."""
        join_equal(parents, numbers)


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
        if not self.masks:
            return numbers
        mask = np.array(self.masks[table], np.int64)
        return gather_bits(numbers, mask) << np.uint64(64 - len(mask))

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None:
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
