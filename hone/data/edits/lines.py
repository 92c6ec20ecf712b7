"""Cuts lines, paragraphs or sentences that other documents of the corpus contain too."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hone.data.corpus import Corpus
from hone.data.edits.base import Edit
from hone.data.edits.cuts import Cuts, compiled, cut_whole
from hone.data.edits.rows import GATHERED_ROWS, ranks, repeated, save, save_sorted

_UNITS = ("line", "paragraph", "sentence")
_ROW = np.dtype([("document", np.int32), ("unit", np.int32)])
_UNIT = np.dtype([("document", np.int32), ("start", np.int64), ("end", np.int64)])


class Lines(Edit):
    """Cuts lines that other documents hold too: navigation, notices, licences. Wenzek et al. 2019 (CCNet), arXiv:1911.00359.

    Two lines are equal when their letters (ASCII without case) and digits (all digits as one) are. The copy in the
    document with the lowest id is kept, the others are cut. `unit: sentence, window: 3, min_documents: 1` is the method
    of C4 (Raffel et al. 2020, arXiv:1910.10683). FineWeb (arXiv:2406.17557) found no gain over MinHash alone from cutting every
    repeated line of the web: raise `min_documents` to cut boilerplate only. A document with too little text left is dropped,
    also when it contained the copy to keep.
    """

    paper: ClassVar[str] = "arXiv:1911.00359"
    unit: Literal["line", "paragraph", "sentence"] = Field(
        "line", description="Unit that is compared and cut: lines, paragraphs (between blank lines) or sentences."
    )
    window: int = Field(1, ge=1, description="Consecutive units that must repeat together.")
    min_documents: int = Field(
        2, ge=1, description="Least documents that contain it; 1 also cuts repeats within one document."
    )
    keep: int = Field(1, ge=0, description="Copies to keep, in order of document ids.")
    min_chars: int = Field(
        20, ge=1, description="Least letters of a window that is cut, so that numbers in tables are kept."
    )
    min_left_bytes: int = Field(100, ge=0, description="A document of which fewer bytes are left is dropped.")
    when: str = Field("kind != 'code'", description="Expression that selects the documents to compare; 'True' for all.")

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Hashes the units of each shard of `corpus`, unless they are in `state`; `corpus` may be some of the shards."""
        for span in corpus.spans():
            self._hash(corpus, span, chosen, state)

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path, gathered_rows: int = GATHERED_ROWS) -> list[Cuts]:
        self.prepare(corpus, self.takes_part(corpus, kept), state)
        spans = list(corpus.spans())
        rank = ranks(corpus.columns["id"])
        firsts = np.array([first for _, _, first, _ in spans], np.int64)
        gone: list[list[np.ndarray]] = [[] for _ in spans]
        paths = [state / f"lines-{number:05d}.npy" for number, *_ in spans]
        for group in repeated(paths, rank, firsts, "unit", gathered_rows):
            units = group.rows["unit"].copy()
            later = compiled("hone.text.edits.lines").later_copies(
                group.key, group.rank, units, self.window, self.min_documents, self.keep
            )
            units, shard = units[later], group.shard[later]
            for number in np.unique(shard):
                gone[number].append(units[shard == number])
        return [self._shard_cuts(span, gone[span[0]], state) for span in spans]

    def _hash(self, corpus: Corpus, span: tuple[int, Path, int, int], chosen: np.ndarray, state: Path) -> None:
        """The units of a shard with their offsets, and the windows of them sorted by hash, unless they are in `state`."""
        number, shard, first, _ = span
        path = state / f"lines-{number:05d}.npy"
        if path.exists():
            return
        kernels = compiled("hone.text.edits.lines")
        units: list[np.ndarray] = [np.empty(0, _UNIT)]
        rows: list[np.ndarray] = [np.empty(0, _ROW)]
        hashed: list[np.ndarray] = [np.empty(0, np.uint64)]
        sizes: list[np.ndarray] = [np.empty((0, 2), np.int64)]
        done = 0
        for indices, texts in corpus.batches(shard, first, chosen):
            text, start, end, hashes, chars = kernels.units_of(texts.data, texts.offsets, _UNITS.index(self.unit))
            here = np.empty(len(text), _UNIT)
            here["document"], here["start"], here["end"] = indices[text] - first, start, end
            place, keys = kernels.windows_of(text, hashes, chars, self.window, self.min_chars)
            part = np.empty(len(place), _ROW)
            part["document"], part["unit"] = here["document"][place], place + done
            hashed.append(keys)
            done += len(text)
            units.append(here)
            rows.append(part)
            sizes.append(np.stack([indices, np.diff(texts.offsets)], 1))
        save(state / f"units-{number:05d}.npy", np.concatenate(units))
        save(state / f"sizes-{number:05d}.npy", np.concatenate(sizes))
        save_sorted(path, np.concatenate(hashed), np.concatenate(rows))

    def _shard_cuts(self, span: tuple[int, Path, int, int], gone: list[np.ndarray], state: Path) -> Cuts:
        """Byte spans of the windows that begin at the units `gone`, each with the space up to what follows."""
        number, _, first, _ = span
        if not gone:
            return Cuts.none()
        units = np.load(state / f"units-{number:05d}.npy")
        documents, sizes = np.load(state / f"sizes-{number:05d}.npy").T
        marks = np.zeros(len(units), bool)
        for offset in range(self.window):
            marks[np.concatenate(gone) + offset] = True
        fresh = np.concatenate([[True], np.diff(units["document"]) != 0])
        last = np.concatenate([fresh[1:], [True]])
        size = sizes[np.searchsorted(documents, units["document"] + first)]
        start, end = units["start"].copy(), np.concatenate([units["start"][1:], [0]])
        end[last] = size[last]
        # A span up to the end of its document includes the space before it; in a run, that of its first unit.
        tail = marks & last
        for unit in np.flatnonzero(tail):
            while not fresh[unit] and marks[unit - 1]:
                unit -= 1
            start[unit] = 0 if fresh[unit] else units["end"][unit - 1]
        found = Cuts.of(units["document"][marks].astype(np.int64) + first, start[marks], end[marks])
        return cut_whole(found, documents, sizes, self.min_left_bytes)
