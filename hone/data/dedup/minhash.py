"""MinHash near-duplicate removal: signatures of word shingles, bands that collide, connected components."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus, publish
from hone.data.dedup.base import Dedup, lowest_ids
from hone.data.signals import mix

_WORD = re.compile(r"\w+")
_CHUNK = 2048


class MinHash(Dedup):
    """Drops documents that share most word shingles with another. Broder 1997; defaults of FineWeb, arXiv:2406.17557.

    Two documents of Jaccard similarity s meet in some band with probability 1 - (1 - s^rows)^bands: at the default
    14 x 8 that is .5 at s = .68, .92 at .8, .9996 at .9. Whoever meets is a duplicate, and so is whoever meets that one.
    """

    paper: ClassVar[str] = "arXiv:2406.17557"
    reason: ClassVar[str] = "near_duplicate"
    shingle_words: int = Field(5, ge=1, description="Words a shingle.")
    bands: int = Field(14, ge=1, description="Bands of the signature; more find more.")
    rows: int = Field(8, ge=1, description="Hashes a band; more demand more similarity.")
    seed: int = Field(1, description="Seed of the hash family.")

    def representatives(self, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
        members = np.flatnonzero(alive)
        signatures = np.concatenate(
            [self._shard(corpus, span, alive, state) for span in corpus.spans()]
            or [np.empty((0, self.bands * self.rows), np.uint32)]
        )
        return lowest_ids([members[group] for group in self.clusters(signatures)], corpus.columns["id"])

    def _shard(self, corpus: Corpus, span: tuple[int, Path, int, int], alive: np.ndarray, state: Path) -> np.ndarray:
        """Signatures of a shard's living documents, from `state` when they are there."""
        number, shard, first, _ = span
        path = state / f"signatures-{number:05d}.npy"
        if not path.exists():
            rows = [self.sign(text) for _, text in corpus.texts(shard, first, alive)]
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                np.save(file, np.array(rows, np.uint32).reshape(-1, self.bands * self.rows))
            publish(temporary, path)
        return np.load(path)

    def sign(self, text: str) -> np.ndarray:
        """The signature of `text`, uint32 [bands * rows]: per hash function the least value over its shingles."""
        words = _WORD.findall(text.lower())
        numbers = {word: zlib.crc32(word.encode()) for word in set(words)}
        ids = np.fromiter((numbers[word] for word in words), np.uint64, len(words))
        n = max(min(self.shingle_words, len(words)), 1)
        shingles = np.zeros(max(len(words) - n + 1, 0), np.uint64)
        for offset in range(n):
            shingles = mix(shingles + ids[offset : len(ids) - n + 1 + offset] + np.uint64(1))
        hashes = (shingles >> np.uint64(32)).astype(np.uint32)
        # x -> a x + b mod 2^32 with odd a is a bijection: no two shingles are merged by it.
        random = np.random.RandomState(self.seed)
        factors = random.randint(0, 1 << 31, self.bands * self.rows, np.uint32) * np.uint32(2) + np.uint32(1)
        shifts = random.randint(0, 1 << 32, self.bands * self.rows, np.uint32)
        least = np.full(self.bands * self.rows, 0xFFFFFFFF, np.uint32)
        for start in range(0, len(hashes), _CHUNK):
            values = factors[:, None] * hashes[None, start : start + _CHUNK] + shifts[:, None]
            np.minimum(least, values.min(1), out=least)
        return least

    def clusters(self, signatures: np.ndarray) -> list[np.ndarray]:
        """Groups (int [k], k > 1) of rows of `signatures` (uint32 [n, bands * rows]) that are connected by equal bands.

        A row without any shingle (all values at their maximum) is no duplicate of anything.
        """
        parent = np.arange(len(signatures))

        def root(node: int) -> int:
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = int(parent[node])
            return node

        real = np.flatnonzero((signatures != 0xFFFFFFFF).any(1))
        for band in range(self.bands):
            part = np.ascontiguousarray(signatures[real, band * self.rows : (band + 1) * self.rows])
            keys = part.view(np.dtype((np.void, part.shape[1] * 4))).ravel()
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            mates = first[inverse]
            for here in np.flatnonzero(mates != np.arange(len(real))):
                one, other = root(int(real[here])), root(int(real[mates[here]]))
                parent[max(one, other)] = min(one, other)
        roots = np.array([root(node) for node in range(len(signatures))], np.int64)
        order = np.argsort(roots, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
        return [group for group in groups if len(group) > 1]
