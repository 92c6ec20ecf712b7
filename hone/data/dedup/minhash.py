"""MinHash near-duplicate removal: signatures of word shingles, bands that collide, connected components."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.dedup.base import Joined, need_numba
from hone.data.dedup.earlier import Shard, counted, with_keys
from hone.text.batch import Texts

if TYPE_CHECKING:
    from hone.data.dedup.joining import Joining


class MinHash(Joined):
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

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        return kept

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> list[Path]:
        """Files of the keys of each shard of `corpus`, computed where they are missing."""
        need_numba()
        from hone.data.dedup import shards

        return shards.sign_shards(corpus, chosen, state, "keys", self.bands, self.keys)

    def joining(self, corpus: Corpus, kept: np.ndarray, state: Path, earlier: Sequence[Shard] = ()) -> Joining:
        from hone.data.dedup.joining import Equal, Joining, Numbers

        files = [state / f"keys-{number:05d}.u64" for number, *_ in corpus.spans()]
        source = Numbers(*with_keys(files, earlier, state, self.bands))
        return Joining(source, Equal(self.bands), state, counted(corpus, earlier))

    def keys(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """A key for each band of each of n texts (uint64 [bands, n]), and which texts have a word (bool [n])."""
        from hone.text.dedup.signing import band_keys

        signatures, worded = self.signatures(texts)
        return band_keys(signatures, self.rows), worded

    def signatures(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Signatures (uint32 [n, bands * rows]), the least value of each hash function over a text's shingles; and which texts have shingles."""
        from hone.text.dedup.signing import signatures

        return signatures(texts.data, texts.offsets, self.shingle_words, *self._family)

    @cached_property
    def _family(self) -> tuple[Any, ...]:
        """The table of letters; factors and shifts of the hash functions x -> a x + b mod 2^32, a odd."""
        from hone.text.units import unit_table

        random = np.random.RandomState(self.seed)
        factors = random.randint(0, 1 << 31, self.bands * self.rows, np.uint32) * np.uint32(2) + np.uint32(1)
        return unit_table(), factors, random.randint(0, 1 << 32, self.bands * self.rows, np.uint32)
