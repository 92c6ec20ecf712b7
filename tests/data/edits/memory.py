"""A corpus held in memory, cut into shards as a test likes: what edits and decontamination ask of the real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hone.data.edits.cuts import Cuts
from hone.text.batch import Texts


class Memory:
    """`texts` with `ids`; `borders` are the numbers of documents of each shard, `batch` how many come at once."""

    def __init__(self, texts: Sequence[str], ids: Sequence[str] | None = None, borders: Sequence[int] = (), batch=3):
        self.words = list(texts)
        self.sizes = list(borders) or [len(texts)]
        assert sum(self.sizes) == len(texts)
        self.shards = [Path(f"{number}") for number in range(len(self.sizes))]
        self.batch = batch
        num = len(texts)
        self.columns = {
            "id": np.array(ids if ids is not None else [f"{number:016x}" for number in range(num)], str),
            "kind": np.full(num, "prose"),
            "source": np.array([f"file-{number}" for number in range(num)], object),
            "bytes": np.array([len(text.encode()) for text in texts], np.int64),
        }

    def __len__(self) -> int:
        return len(self.words)

    def spans(self) -> Iterator[tuple[int, Path, int, int]]:
        first = 0
        for number, size in enumerate(self.sizes):
            yield number, self.shards[number], first, first + size
            first += size

    def batches(self, shard: Path, first: int, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, Texts]]:
        size = self.sizes[int(shard.name)]
        wanted = first + np.flatnonzero(chosen[first : first + size])
        for start in range(0, len(wanted), self.batch):
            part = wanted[start : start + self.batch]
            yield part, Texts.of([self.words[index] for index in part])

    def after(self, cuts: Sequence[Cuts]) -> list[str]:
        """The texts with `cuts` left out, by plain Python."""
        left = [text.encode() for text in self.words]
        for shard in cuts:
            for document, start, end, fill in reversed(list(zip(*(part.tolist() for part in shard)))):
                assert 0 <= start < end <= len(left[document])
                left[document] = left[document][:start] + fill + left[document][end:]
        return [text.decode() for text in left]
