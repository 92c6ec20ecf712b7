"""MinHash near-duplicate removal: signatures of word shingles, bands that collide, connected components."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.dedup.base import Dedup, lowest_ids, need_numba
from hone.data.text.batch import Texts

SORT_KEYS = 1 << 23
"""Keys sorted at once, about 300 MB: a band of more documents is sorted in ranges of its keys."""


class MinHash(Dedup):
    """Drops documents that share most word shingles with another. Broder 1997; defaults of FineWeb, arXiv:2406.17557.

    Two documents of Jaccard similarity s meet in some band with probability 1 - (1 - s^rows)^bands: at the default
    14 x 8 that is .5 at s = .68, .92 at .8, .9996 at .9. Whoever meets is a duplicate, and so is whoever meets that one.
    Memory: a batch of text, SORT_KEYS keys, and 24 bytes a document; one key that more documents share is sorted whole.
    """

    paper: ClassVar[str] = "arXiv:2406.17557"
    reason: ClassVar[str] = "near_duplicate"
    shingle_words: int = Field(5, ge=1, description="Words a shingle.")
    bands: int = Field(14, ge=1, description="Bands of the signature; more find more.")
    rows: int = Field(8, ge=1, description="Hashes a band; more demand more similarity.")
    seed: int = Field(1, description="Seed of the hash family.")

    def takes_part(self, corpus: Corpus, alive: np.ndarray) -> np.ndarray:
        return alive

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> list[Path]:
        """Files of the keys of each shard of `corpus`, made unless they are there."""
        need_numba()
        from hone.data.dedup import shards

        return shards.sign_shards(corpus, chosen, state, "keys", self.bands, self.keys)

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        files = self.prepare(corpus, alive, state)
        from hone.data.dedup import union_find

        parents = union_find.singles(len(alive))
        for file in edge_files(files, self.bands, state):
            edges = np.fromfile(file, np.int64).reshape(2, -1)
            union_find.join(parents, edges[0], edges[1])
        union_find.flatten(parents)
        return lowest_ids(parents, corpus.columns["id"])

    def keys(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """A key for each band of each of n texts (uint64 [bands, n]), and which texts have a word at all (bool [n])."""
        from hone.data.dedup.signing import band_keys

        signatures, worded = self.signatures(texts)
        return band_keys(signatures, self.rows), worded

    def signatures(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Signatures (uint32 [n, bands * rows]): per hash function the least value over a text's shingles; and which have any."""
        from hone.data.dedup.signing import signatures

        return signatures(texts.data, texts.offsets, self.shingle_words, *self._family)

    @cached_property
    def _family(self) -> tuple[Any, ...]:
        """The table of letters; factors and shifts of the hash functions x -> a x + b mod 2^32, a odd."""
        from hone.data.text.hashing import word_table

        random = np.random.RandomState(self.seed)
        factors = random.randint(0, 1 << 31, self.bands * self.rows, np.uint32) * np.uint32(2) + np.uint32(1)
        return word_table(), factors, random.randint(0, 1 << 32, self.bands * self.rows, np.uint32)


def edge_files(files: list[Path], bands: int, state: Path, most: int = SORT_KEYS) -> list[Path]:
    """Files of edges (int64 [2, m]) between documents with an equal key in a band, one for each range of each band's keys."""
    from hone.data.dedup import shards

    # Named after the very files that they come from: edges of keys that were made again are not taken over.
    made_of = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.blake2b(repr(made_of).encode(), digest_size=4).hexdigest()
    num_keys = sum(shards.length(file, 1 + bands) for file in files)
    part_bits = max(-(-num_keys // most) - 1, 0).bit_length()
    made = []
    for band in range(bands):
        paths = [state / f"edges-{name}-{band:03d}-{part:05d}.i64" for part in range(1 << part_bits)]
        made += paths
        if all(path.exists() for path in paths):
            continue
        if not part_bits:
            shards.save(paths[0], equal_keys(*shards.gather(files, 1 + bands, 1 + band)))
            continue
        for path, held in zip(paths, shards.ranges(files, 1 + bands, 1 + band, part_bits, state / "ranges")):
            if not path.exists():
                shards.save(path, equal_keys(*shards.load_range(held)))
            held.unlink()
    return made


def equal_keys(indices: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Edges (int64 [2, m]) that connect all `indices` (int64 [k]) whose `keys` (uint64 [k]) are equal."""
    order = np.argsort(keys)
    keys, indices = keys[order], indices[order]
    same = keys[1:] == keys[:-1]
    return np.stack([indices[:-1][same], indices[1:][same]])
