"""Substrings that the corpus holds already are cut, wherever they begin and end: sampled windows instead of a suffix array."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.edits.base import Edit
from hone.data.edits.cuts import Cuts, compiled, cut_whole
from hone.data.edits.rows import GATHERED_ROWS, ranks, repeated, save, save_sorted, save_spans, spans_of
from hone.data.expression import evaluate

_RUN = np.dtype(
    [("key", np.uint64), ("whole", np.uint64), ("document", np.int32), ("start", np.uint32), ("count", np.uint16)]
)
_WINDOW = np.dtype([("key", np.uint64), ("document", np.int32), ("start", np.uint32)])


class Substrings(Edit):
    """Cuts every substring of at least `min_bytes` that stands earlier in the corpus. Lee et al. 2022, arXiv:2107.06499.

    Earlier means in a document with a lower id, or before it in the same one; that first copy stays whole. The paper sorts all
    suffixes, which takes about ten times the text in memory. Here each window of `min_bytes` is known by the least hash among
    the substrings in it (winnowing: Schleimer et al. 2003, doi:10.1145/872757.872770), so that equal windows share their sample
    wherever they stand. Windows come in runs of one sample; runs whose sample stands once are done with, runs that are equal
    as a whole are judged at once, and only where equal samples stand in different runs is each window hashed. So all that a
    suffix array finds is found (up to collisions of 64-bit hashes), from files sorted by hash, a range at a time.

    A cut is made narrower until it begins and ends between words; left out when that takes half of it away. A document that
    is left too short goes whole, also when it held the copy that would have stayed.
    """

    paper: ClassVar[str] = "arXiv:2107.06499"
    min_bytes: int = Field(100, ge=20, le=10_000, description="Least length of a repeat.")
    min_left_bytes: int = Field(100, ge=0, description="A document cut below so many bytes is dropped.")
    when: str = Field(
        "True", description="Expression that picks the documents that take part, for example kind != 'code'."
    )

    @property
    def gram_bytes(self) -> int:
        """Length of the substrings that windows are known by. Shorter ones sample less but stand more often by chance."""
        return self.min_bytes // 2

    def cuts(self, corpus: Corpus, alive: np.ndarray, state: Path, gathered_rows: int = GATHERED_ROWS) -> list[Cuts]:
        chosen = alive & evaluate(self.when, corpus.columns)
        spans = list(corpus.spans())
        for span in spans:
            self._sample(corpus, span, chosen, state)
        rank = ranks(corpus.columns["id"])
        firsts = np.array([first for _, _, first, _ in spans], np.int64)
        numbers = [number for number, *_ in spans]
        runs = self._judge_runs([state / f"runs-{n:05d}.npy" for n in numbers], rank, firsts, state, gathered_rows)
        for span in spans:
            self._hash(corpus, span, chosen, state, [state / f"doubt-{part:05d}.npy" for part in range(runs)])
        windows = self._judge_windows(
            [state / f"windows-{n:05d}.npy" for n in numbers], rank, firsts, state, gathered_rows
        )
        gone = [state / f"gone-runs-{part:05d}.npy" for part in range(runs)]
        gone += [state / f"gone-windows-{part:05d}.npy" for part in range(windows)]
        return [self._shard_cuts(corpus, span, chosen, state, gone) for span in spans]

    def _sample(self, corpus: Corpus, span: tuple[int, Path, int, int], chosen: np.ndarray, state: Path) -> None:
        """The runs of a shard sorted by their samples, unless they are in `state`."""
        number, shard, first, _ = span
        path = state / f"runs-{number:05d}.npy"
        if path.exists():
            return
        parts = [np.empty(0, _RUN)]
        for indices, texts in corpus.batches(shard, first, chosen):
            text, *columns = compiled("windows").runs_of(texts.data, texts.offsets, self.min_bytes, self.gram_bytes)
            rows = np.empty(len(text), _RUN)
            rows["document"] = indices[text] - first
            rows["start"], rows["count"], rows["key"], rows["whole"] = columns
            parts.append(rows)
        save_sorted(path, np.concatenate(parts))

    def _judge_runs(
        self, paths: list[Path], rank: np.ndarray, firsts: np.ndarray, state: Path, gathered_rows: int
    ) -> int:
        """Writes which runs repeat earlier ones and which need a look at each window; returns the number of files of each."""
        done = state / "runs-judged.npy"
        if done.exists():
            return int(np.load(done))
        number = 0
        for group in repeated(paths, rank, firsts, "start", gathered_rows):
            rows = group.rows
            start, count = rows["start"].astype(np.int64), rows["count"].astype(np.int64)
            verdict = compiled("windows").judge_runs(
                rows["key"].copy(), rows["whole"].copy(), group.rank, start, count, self.min_bytes
            )
            for name, value, more in (("gone-runs", 1, self.min_bytes - 1), ("doubt", 2, 0)):
                some = verdict == value
                parts = (group.shard[some], rows["document"][some], start[some], (start + count)[some] + more)
                save_spans(state / f"{name}-{number:05d}.npy", *parts)
            number += 1
        save(done, np.array(number))
        return number

    def _hash(
        self,
        corpus: Corpus,
        span: tuple[int, Path, int, int],
        chosen: np.ndarray,
        state: Path,
        doubts: list[Path],
    ) -> None:
        """The windows of a shard that must be looked at one by one, sorted by hash, unless they are in `state`."""
        number, shard, first, _ = span
        path = state / f"windows-{number:05d}.npy"
        if path.exists():
            return
        ranges = Cuts.of(*spans_of(doubts, number))
        wanted = np.zeros(len(chosen), bool)
        wanted[ranges.document + first] = True
        parts = [np.empty(0, _WINDOW)]
        for indices, texts in corpus.batches(shard, first, wanted) if len(ranges.document) else ():
            low, high = np.searchsorted(ranges.document + first, [indices[0], indices[-1] + 1])
            document, start, end = (part[low:high] for part in ranges)
            text = np.searchsorted(indices, document + first)
            rows = np.empty((end - start).sum(), _WINDOW)
            rows["key"] = compiled("windows").hashes_of(texts.data, texts.offsets, text, start, end, self.min_bytes)
            rows["document"] = np.repeat(document, end - start)
            skipped = np.cumsum(end - start) - (end - start)
            rows["start"] = np.arange(len(rows)) + np.repeat(start - skipped, end - start)
            parts.append(rows)
        save_sorted(path, np.concatenate(parts))

    def _judge_windows(
        self, paths: list[Path], rank: np.ndarray, firsts: np.ndarray, state: Path, gathered_rows: int
    ) -> int:
        """Writes which windows stand earlier; returns the number of files."""
        number = 0
        for group in repeated(paths, rank, firsts, "start", gathered_rows):
            start = group.rows["start"].astype(np.int64)
            gone = compiled("windows").later_windows(group.rows["key"].copy(), group.rank, start, self.min_bytes)
            parts = (group.shard[gone], group.rows["document"][gone], start[gone], start[gone] + self.min_bytes)
            save_spans(state / f"gone-windows-{number:05d}.npy", *parts)
            number += 1
        return number

    def _shard_cuts(
        self, corpus: Corpus, span: tuple[int, Path, int, int], chosen: np.ndarray, state: Path, gone: list[Path]
    ) -> Cuts:
        """The repeats of a shard, brought to the borders of words, from `state` when they are there."""
        number, shard, first, _ = span
        path = state / f"cuts-{number:05d}.npy"
        if not path.exists():
            document, start, end = spans_of(gone, number)
            repeats = Cuts.of(document + first, start, end)
            wanted = np.zeros(len(chosen), bool)
            wanted[repeats.document] = True
            found = [np.stack(Cuts.none())]
            for indices, texts in corpus.batches(shard, first, wanted) if len(document) else ():
                low, high = np.searchsorted(repeats.document, [indices[0], indices[-1] + 1])
                parts = compiled("spans").at_borders(*texts, indices, *(part[low:high] for part in repeats))
                found.append(np.stack(cut_whole(Cuts.of(*parts), indices, np.diff(texts.offsets), self.min_left_bytes)))
            save(path, np.concatenate(found, 1))
        return Cuts(*np.load(path))
