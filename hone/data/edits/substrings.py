"""Cuts substrings that occur earlier in the corpus, at any offset: sampled windows instead of a suffix array."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus, Part
from hone.data.edits.base import Edit
from hone.data.edits.cuts import Cuts, compiled, cut_whole
from hone.data.edits.rows import GATHERED_ROWS, ranks, repeated, save, save_sorted, save_spans, spans_of
from hone.data.executors.task import Function, Task, contents

_RUN = np.dtype([("whole", np.uint64), ("document", np.int32), ("start", np.uint32), ("count", np.uint16)])
_DOUBT = np.dtype(
    [
        ("key", np.uint64),
        ("rank", np.int64),
        ("shard", np.int64),
        ("document", np.int64),
        ("start", np.int64),
        ("count", np.int64),
    ]
)


class Substrings(Edit):
    """Cuts every substring of at least `min_bytes` that occurs earlier in the corpus. Lee et al. 2022, arXiv:2107.06499.

    Earlier means in a document with a lower id, or before it in the same one; the first copy is kept. The paper sorts all
    suffixes, which takes about ten times the text in memory. Here each window of `min_bytes` is sampled: its key is the least
    hash of the substrings in it (winnowing: Schleimer et al. 2003, doi:10.1145/872757.872770), so that equal windows have equal
    keys. Consecutive windows of one key are a run; runs with a unique key are not repeats, runs that are equal
    as a whole are compared once, and only windows of other runs with equal keys are hashed one by one. So it finds all that a
    suffix array finds (up to collisions of 64-bit hashes), with files sorted by hash, a range at a time.

    A cut is narrowed until it begins and ends between words, and left out when it loses half its bytes. A document with
    too little text left is dropped, also when it contained the copy to keep.
    """

    paper: ClassVar[str] = "arXiv:2107.06499"
    min_bytes: int = Field(100, ge=20, le=10_000, description="Least length of a repeat.")
    min_left_bytes: int = Field(100, ge=0, description="A document of which fewer bytes are left is dropped.")
    when: str = Field(
        "True", description="Expression that selects the documents to compare, for example kind != 'code'."
    )

    @property
    def gram_bytes(self) -> int:
        """Length of the substrings whose hashes are the windows' keys. Shorter ones give fewer keys, but more are equal by chance."""
        return self.min_bytes * 3 // 5

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Samples the windows of each shard of `corpus`, unless they are in `state`; `corpus` may be some of the shards."""
        for span in corpus.spans():
            self._sample(corpus, span, chosen, state)

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path, gathered_rows: int = GATHERED_ROWS) -> list[Cuts]:
        spans = list(corpus.spans())
        done = [state / f"cuts-{number:05d}.npy" for number, *_ in spans]
        if all(path.exists() for path in done):
            return [Cuts.plain(*np.load(path)) for path in done]
        self.prepare(corpus, self.takes_part(corpus, kept), state)
        parts = self._judge_runs(corpus, state, gathered_rows)
        for span in spans:
            self._hash(corpus, span, _asked(state, parts), state)
        self._judge_windows(len(spans), state, parts)
        return [self._shard_cuts(corpus, span, _gone(state, parts), state) for span in spans]

    def rounds(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """The rounds that read texts, after `prepare`: hashing windows of a shard, and moving its cuts to the borders of words.

        Between the rounds, this process decides by the hashes alone which windows repeat.
        """
        parts = self._judge_runs(corpus, state, GATHERED_ROWS)
        yield hash_windows, self._tasks("windows", corpus, _asked(state, parts), state)
        self._judge_windows(len(corpus.sizes), state, parts)
        yield cut_repeats, self._tasks("cuts", corpus, _gone(state, parts), state)

    def _tasks(self, name: str, corpus: Corpus, spans: tuple[Path, ...], state: Path) -> list[Task]:
        """A task for each shard that has spans in the files `spans`."""
        read = contents(spans)
        return [
            Task.of(f"{name}-{part.number:05d}", state, {"technique": self, "part": part, "spans": spans}, read)
            for part in corpus.parts()
        ]

    def _sample(self, corpus: Corpus, span: tuple[int, Path, int, int], chosen: np.ndarray, state: Path) -> None:
        """The runs of a shard sorted by their keys, unless they are in `state`."""
        number, shard, first, _ = span
        path = state / f"runs-{number:05d}.npy"
        if path.exists():
            return
        parts, keys = [np.empty(0, _RUN)], [np.empty(0, np.uint64)]
        for indices, texts in corpus.batches(shard, first, chosen):
            text, start, count, key, whole = compiled("hone.text.edits.windows").runs_of(
                *texts, self.min_bytes, self.gram_bytes
            )
            rows = np.empty(len(text), _RUN)
            rows["document"] = indices[text] - first
            rows["start"], rows["count"], rows["whole"] = start, count, whole
            parts.append(rows)
            keys.append(key)
        save_sorted(path, np.concatenate(keys), np.concatenate(parts))

    def _judge_runs(self, corpus: Corpus, state: Path, gathered_rows: int) -> int:
        """Writes, one file per range of keys, which runs repeat earlier ones and which runs' windows must be hashed.

        Returns the number of ranges.
        """
        done = state / "runs-judged.npy"
        if done.exists():
            return int(np.load(done))
        firsts = np.array([first for _, _, first, _ in corpus.spans()], np.int64)
        paths = [state / f"runs-{number:05d}.npy" for number, *_ in corpus.spans()]
        number = 0
        for group in repeated(paths, ranks(corpus.columns["id"]), firsts, "start", gathered_rows):
            rows = group.rows
            start, count = rows["start"].astype(np.int64), rows["count"].astype(np.int64)
            verdict = compiled("hone.text.edits.windows").judge_runs(
                group.key, rows["whole"].copy(), group.rank, start, count, self.min_bytes
            )
            some = verdict == 1
            parts = (group.shard[some], rows["document"][some], start[some], (start + count)[some] + self.min_bytes - 1)
            save_spans(state / f"gone-runs-{number:05d}.npy", *parts)
            some = verdict == 2
            doubts = np.empty(some.sum(), _DOUBT)
            doubts["key"], doubts["rank"], doubts["shard"] = group.key[some], group.rank[some], group.shard[some]
            doubts["document"], doubts["start"], doubts["count"] = rows["document"][some], start[some], count[some]
            save(state / f"doubt-{number:05d}.npy", doubts)
            # The same spans, grouped by shard in the same order.
            parts = (group.shard[some], rows["document"][some], start[some], (start + count)[some])
            save_spans(state / f"asked-{number:05d}.npy", *parts)
            number += 1
        save(done, np.array(number))
        return number

    def _hash(self, corpus: Corpus, span: tuple[int, Path, int, int], asked: tuple[Path, ...], state: Path) -> None:
        """Hashes of the windows of a shard that are compared one by one, in the order of `asked`, unless in `state`."""
        number, shard, first, last = span
        path = state / f"windows-{number:05d}.npy"
        if path.exists():
            return
        document, start, end = spans_of(asked, number)
        place = np.cumsum(end - start) - (end - start)
        out = np.empty((end - start).sum(), np.uint64)
        order = np.argsort(document, kind="stable")
        document, start, end, place = document[order] + first, start[order], end[order], place[order]
        wanted = np.zeros(last, bool)
        wanted[document] = True
        for indices, texts in corpus.batches(shard, first, wanted) if len(document) else ():
            here = slice(*np.searchsorted(document, [indices[0], indices[-1] + 1]))
            text = np.searchsorted(indices, document[here])
            compiled("hone.text.edits.windows").hash_windows(
                *texts, text, start[here], end[here], self.min_bytes, place[here], out
            )
        save(path, out)

    def _judge_windows(self, num_shards: int, state: Path, parts: int) -> None:
        """Writes, one file per range of keys, which of the hashed windows occur earlier."""
        kernels = compiled("hone.text.edits.windows")
        done = np.zeros(num_shards, np.int64)
        for part in range(parts):
            doubts = np.load(state / f"doubt-{part:05d}.npy")
            key, rank, shard, document, start, count = (doubts[name].copy() for name in _DOUBT.names)
            place = np.cumsum(count) - count
            hashes = np.empty(count.sum(), np.uint64)
            order = np.argsort(shard, kind="stable")
            numbers, begins = np.unique(shard[order], return_index=True)
            for number, rows in zip(numbers.tolist(), np.split(order, begins[1:])):
                values = np.load(state / f"windows-{number:05d}.npy", mmap_mode="r")
                size = int(count[rows].sum())
                kernels.gathered(np.array(values[done[number] : done[number] + size]), rows, place, count, hashes)
                done[number] += size
            run, low, high = kernels.later_windows(key, rank, start, count, hashes, self.min_bytes)
            save_spans(
                state / f"gone-windows-{part:05d}.npy", shard[run], document[run], low, high + self.min_bytes - 1
            )

    def _shard_cuts(
        self, corpus: Corpus, span: tuple[int, Path, int, int], gone: tuple[Path, ...], state: Path
    ) -> Cuts:
        """The repeats of a shard, moved to the borders of words, from `state` if there."""
        number, shard, first, last = span
        path = state / f"cuts-{number:05d}.npy"
        if not path.exists():
            document, start, end = spans_of(gone, number)
            repeats = Cuts.of(document + first, start, end)
            wanted = np.zeros(last, bool)
            wanted[repeats.document] = True
            found = [np.stack(Cuts.none()[:3])]
            for indices, texts in corpus.batches(shard, first, wanted) if len(document) else ():
                low, high = np.searchsorted(repeats.document, [indices[0], indices[-1] + 1])
                some = (part[low:high] for part in repeats[:3])
                parts = compiled("hone.text.edits.spans").at_borders(
                    *texts, indices, *some, compiled("hone.text.units").unit_table()
                )
                cuts = cut_whole(Cuts.of(*parts), indices, np.diff(texts.offsets), self.min_left_bytes)
                found.append(np.stack(cuts[:3]))
            save(path, np.concatenate(found, 1))
        return Cuts.plain(*np.load(path))


def hash_windows(folder: Path, technique: Substrings, part: Part, spans: tuple[Path, ...]) -> dict[str, Any]:
    """Writes the hashes of the windows of one shard that are listed in the files `spans`."""
    corpus = Corpus.of(part)
    for span in corpus.spans():
        technique._hash(corpus, span, spans, folder)
    return {"rows": len(corpus)}


def cut_repeats(folder: Path, technique: Substrings, part: Part, spans: tuple[Path, ...]) -> dict[str, Any]:
    """Writes the cuts of one shard, whose repeats are listed in the files `spans`."""
    corpus = Corpus.of(part)
    for span in corpus.spans():
        technique._shard_cuts(corpus, span, spans, folder)
    return {"rows": len(corpus)}


def _asked(state: Path, parts: int) -> tuple[Path, ...]:
    return tuple(state / f"asked-{part:05d}.npy" for part in range(parts))


def _gone(state: Path, parts: int) -> tuple[Path, ...]:
    return tuple(state / f"gone-{what}-{part:05d}.npy" for what in ("runs", "windows") for part in range(parts))
