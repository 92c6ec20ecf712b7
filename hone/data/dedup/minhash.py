"""MinHash near-duplicate removal: signatures of word shingles, bands that collide, connected components."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.lazy import resolve
from hone.data.dedup.base import Signed

if TYPE_CHECKING:
    from hone.text.batch import Texts


class MinHash(Signed):
    """Drops documents that share most word shingles with another. Broder 1997; defaults of FineWeb, arXiv:2406.17557.

    Two documents of Jaccard similarity s share a band with probability 1 - (1 - s^rows)^bands: at the default
    14 x 8 that is .5 at s = .68, .92 at .8, .9996 at .9. Documents that share a band are duplicates, transitively.
    Memory: of a task a batch of text, or SORT_KEYS keys (joining.py; all documents of one key at once); of
    the process that merges the tasks' pairs, 8 bytes per document.
    """

    paper: ClassVar[str] = "arXiv:2406.17557"
    reason: ClassVar[str] = "near_duplicate"
    shingle_words: int = Field(5, ge=1, description="Words per shingle.")
    bands: int = Field(14, ge=1, description="Bands of the signature; more find more.")
    rows: int = Field(8, ge=1, description="Hashes per band; more require more similarity.")
    seed: int = Field(1, description="Seed of the hash family.")

    @property
    def num_keys(self) -> int:
        return self.bands

    def keys(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """A key for each band of each of n texts (uint64 [bands, n]), and which texts have a word (bool [n])."""
        signatures, worded = self.signatures(texts)
        return resolve("hone.text.dedup.signing:band_keys")(signatures, self.rows), worded

    def signatures(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Signatures (uint32 [n, bands * rows]), the least value of each hash function over a text's shingles; and which texts have shingles."""
        sign = resolve("hone.text.dedup.signing:signatures")
        return sign(texts.data, texts.offsets, self.shingle_words, *self._family)

    @cached_property
    def _family(self) -> tuple[Any, ...]:
        """The table of letters; factors and shifts of the hash functions x -> a x + b mod 2^32, a odd."""
        random = np.random.RandomState(self.seed)
        factors = random.randint(0, 1 << 31, self.bands * self.rows, np.uint32) * np.uint32(2) + np.uint32(1)
        return self.unit_table(), factors, random.randint(0, 1 << 32, self.bands * self.rows, np.uint32)
