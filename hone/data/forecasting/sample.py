"""Sample: documents from all parts of the input, evenly spaced by bytes, so that every part of a sorted source is represented.

Of each sort of file (format and compression), units are chosen at even distances along their bytes (systematic sampling with
probability proportional to size; Madow 1949): files, or parts of large ones. More is read of formats that are read fast, and
of what is read, the documents that begin in ranges of RANGE_BYTES, again at even distances, are the sample.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import HoneError
from hone.data.annotate import part_of
from hone.data.readers.documents import Batch, Options, poisoned
from hone.data.readers.formats.containers import unpacked_bytes
from hone.data.readers.parts import parts
from hone.data.readers.read import read_batches
from hone.data.readers.rows import row_group_bytes
from hone.feed.files.listing import File
from hone.feed.files.streams import head, open_raw

RANGE_BYTES = 64 << 10
READ_BYTES = 64 << 20
"""Bytes to read of each sort of file that is read fast."""
_READ_FAST = ("text", "jsonl", "json", "csv", "arrow", "warc", "parquet")
_CUT = (*_READ_FAST, "zip", "tar")
"""Formats of which a part or the beginning can be read."""
_PART_BYTES = 1 << 20
_HEAD_BYTES = 512 << 10
_USUALLY = 4.0
"""Uncompressed bytes per compressed byte where that cannot be measured."""

Sort = tuple[str, str]


class Unit(NamedTuple):
    """A file or a part of one with about `content` bytes before compression; at most `most_text` bytes of text are read.

    `stands_for` is the number of input bytes that it represents in a sample.
    """

    file: File
    content: float
    most_text: float = float("inf")
    stands_for: float = 0.0

    @property
    def sort(self) -> Sort:
        return self.file.format, self.file.compression


def units_of(files: Sequence[File]) -> list[Unit]:
    """All of `files`; the compression ratio of each sort is measured on its largest file."""
    largest = {(file.format, file.compression): file for file in sorted(files, key=lambda file: file.size)}
    swells = {sort: _swells(file) for sort, file in largest.items()}
    return [Unit(file, max(file.size * swells[file.format, file.compression], 1.0)) for file in files]


def _swells(file: File) -> float:
    if not file.compression and file.format not in ("parquet", "zip"):
        return 1.0
    try:
        if file.format == "zip":
            return max(unpacked_bytes(file) / max(file.size, 1), 1.0)
        if file.format == "parquet":
            return max(sum(row_group_bytes(file, Options())) / max(file.size, 1), 1.0)
        return max(len(head(file, _HEAD_BYTES)) / max(min(file.size, _HEAD_BYTES), 1), 1.0)
    except HoneError:
        raise
    except BaseException as error:  # broken; reading it reports that
        if not poisoned(error):
            raise
        return _USUALLY


class Range(NamedTuple):
    """Documents that were sampled together: `text` bytes of the unit with index `unit` of those read."""

    sort: Sort
    unit: int
    text: float


class Sample:
    """About `num_bytes` of the content of `units`. `batches` reads it; the other attributes are known after that.

    `place` maps a document's id to its index in `ranges`. `beginnings`: of some large file only the beginning was read, and
    represents all of it. `whole`: the sample is the whole input. `read_s` is the estimated time of reading all of the input at
    the speed of the sample.
    """

    def __init__(self, units: Sequence[Unit], num_bytes: float, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.content = sum(unit.content for unit in units)
        self.whole = self.content <= num_bytes and all(unit.most_text == float("inf") for unit in units)
        self.sorts: dict[Sort, list[Unit]] = {}
        for unit in units:
            self.sorts.setdefault(unit.sort, []).append(unit)
        self._taken = min(num_bytes / max(self.content, 1.0), 1.0)
        self.beginnings = False
        self.place: dict[str, int] = {}
        self.ranges: list[Range] = []
        self.units: list[Unit] = []
        self._unit_text: list[float] = []
        self.read_s = 0.0
        self.spent_s = 0.0

    def batches(self) -> Iterator[Batch]:
        """The documents of the sample."""
        for sort, those in self.sorts.items():
            total = sum(unit.content for unit in those)
            wanted, fast = self._taken * total, sort[0] in _READ_FAST
            most = max(READ_BYTES, wanted) if fast else wanted
            chosen = _spread(self._cut(those, most), most)
            read = sum(unit.content for unit in chosen)
            step = RANGE_BYTES * max(read / wanted, 1.0) if fast else RANGE_BYTES
            passed, before = 0.0, self.spent_s
            for unit in chosen:
                self.units.append(unit)
                self._unit_text.append(0.0)
                for batch in self._read(unit):
                    passed = yield from self._in_ranges(batch, unit, passed, step)
                    if self._unit_text[-1] >= unit.most_text:
                        break
            self.read_s += (self.spent_s - before) * total / read

    def _in_ranges(self, batch: Batch, unit: Unit, passed: float, step: float) -> Iterator[Batch]:
        """Those of a batch that begin in ranges `step` bytes apart; returns the position after the batch, in bytes of this sort."""
        sizes = np.diff(batch.texts.offsets)
        starts = np.cumsum(sizes) - sizes
        there = self._unit_text[-1] + starts < unit.most_text
        numbers, inside = np.divmod(passed + starts, step)  # so the first document is always in the sample
        chosen = there & (inside < RANGE_BYTES)
        for number in np.unique(numbers[chosen]):
            here = np.flatnonzero(chosen & (numbers == number))
            taken = part_of(batch, slice(int(here[0]), int(here[-1]) + 1))
            self.place.update(dict.fromkeys(taken.ids, len(self.ranges)))
            self.ranges.append(Range(unit.sort, len(self.units) - 1, float(sizes[here].sum())))
            yield taken
        self._unit_text[-1] += float(sizes[there].sum())
        return passed + float(sizes[there].sum())

    def taken(self) -> np.ndarray:
        """Bytes of the input sampled in each range."""
        rates = [unit.content / max(text, 1.0) for unit, text in zip(self.units, self._unit_text)]
        return np.array([one.text * rates[one.unit] for one in self.ranges])

    def weights(self) -> np.ndarray:
        """Input bytes that one byte of each range represents."""
        read, chosen = Counter[Sort](), Counter[Sort]()
        for unit, text in zip(self.units, self._unit_text):
            read[unit.sort] += text
        for one in self.ranges:
            chosen[one.sort] += one.text
        of_unit = [unit.stands_for / unit.content for unit in self.units]
        return np.array([of_unit[one.unit] * read[one.sort] / max(chosen[one.sort], 1.0) for one in self.ranges])

    def share(self) -> float:
        """The share of the input that was sampled."""
        taken = self.taken()
        return 1.0 if self.whole else min(float(taken.sum() / max((taken * self.weights()).sum(), 1.0)), 1.0)

    def _read(self, unit: Unit) -> Iterator[Batch]:
        """The documents of a unit, timed; ignores broken ones, which the stage reports."""
        items = read_batches(unit.file, self.options)
        while True:
            begun = time.perf_counter()
            item = next(items, None)
            self.spent_s += time.perf_counter() - begun
            if item is None:
                return
            if isinstance(item, Batch):
                yield item

    def _cut(self, units: Sequence[Unit], most: float) -> list[Unit]:
        """`units`, large ones in parts when they have more than `most` bytes together; of those without parts, the beginning."""
        if sum(unit.content for unit in units) <= most or units[0].file.format not in _CUT:
            return list(units)
        made = []
        for unit in units:
            cut = parts(unit.file, self.options, _PART_BYTES) if unit.most_text == float("inf") else [unit.file]
            each = [Unit(part, unit.content * part.size / max(unit.file.size, 1)) for part in cut]
            if len(cut) > 1:
                made += each
            elif unit.content > most / 2 and unit.most_text == float("inf"):
                made.append(self._beginning(unit, most / 2))
            else:
                made.append(unit)
        return made

    def _beginning(self, unit: Unit, content: float) -> Unit:
        """A copy of the beginning of a file with `content` bytes, which represents all of it."""
        self.beginnings = True
        path = self.folder / f"beginning-{len(list(self.folder.iterdir())):05d}"
        with open_raw(unit.file) as raw:
            path.write_bytes(raw.read(int(unit.file.size * content / unit.content)))
        return Unit(replace(unit.file, path=path, url="", size=path.stat().st_size), content, stands_for=unit.content)


def _spread(units: Sequence[Unit], most: float) -> list[Unit]:
    """Units at even distances along the bytes of `units`, with about `most` bytes together; at least one.

    One that is larger than the distance is always chosen, represents itself, and counts as no more than the distance.
    """
    content = np.array([unit.content for unit in units])
    sizes = np.maximum(content, [unit.stands_for for unit in units])
    reach = np.cumsum(sizes)
    if content.sum() <= most:
        return [unit._replace(stands_for=size) for unit, size in zip(units, sizes.tolist())]
    found, count = np.searchsorted(reach, reach[-1:] / 2), 1
    more = 2
    while more < 4 * len(units):
        at = np.searchsorted(reach, (np.arange(more) + 0.5) * reach[-1] / more)
        if np.minimum(content[np.unique(at)], reach[-1] / more).sum() > most:
            break
        found, count, more = at, more, more + more // 4 + 1
    places, times = np.unique(found, return_counts=True)
    return [units[at]._replace(stands_for=float(many * reach[-1] / count)) for at, many in zip(places, times)]
