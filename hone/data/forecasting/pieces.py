"""Pieces: a sample of the input that gives every byte the same chance, spread evenly over all files and inside the large ones.

The files in their order are one line of bytes. Ranges of PIECE_BYTES lie at even distances on it, and what begins in a
range is taken whole: a small file, a row, a record, a document. So no size of file or row is favoured, and a source that is
sorted is seen in all of its parts (systematic sampling with probability proportional to size: Madow 1949).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import HoneError
from hone.base.lazy import lazy
from hone.data.forecasting.borders import border_of, stretches
from hone.data.readers.documents import Options, poisoned
from hone.data.readers.encodings import marked as marked_as
from hone.data.readers.listing import File
from hone.data.readers.streams import head, open_raw, open_stream

parquet = lazy("pyarrow.parquet")

PIECE_BYTES = 64 << 10
_UNIT_BYTES = 512 << 10
"""Files up to here are never cut."""
_STREAM_BYTES = 64 << 20
"""So much of all compressed files, as text, is read along to reach places inside them."""
_TABLE_BYTES = 128 << 20
"""So much of all Parquet tables is decoded to take rows from."""
_SLICE_BYTES = 256 << 10
_USUALLY = 4.0
_TABLE_NUMBERS = 1 << 40
"""Slices of tables are numbered downwards from here, apart from all ranges."""
_MARK = "\x1f"
CUT, WHOLE, CERTAIN = "cut", "whole", "certain"

_LARGE = 2
"""Files of more than so many pieces that are not cut are taken for certain, the largest first, ..."""
_LARGE_SHARE = 0.25
"""... up to this share of the sample: one of them, met or missed by chance, would count for too much."""

Stratum = tuple[str, str, str]


class Extent(NamedTuple):
    """A file of which the first `share` is meant; a byte of it holds `swells` bytes before compression, about."""

    file: File
    swells: float = 1.0
    share: float = 1.0

    @property
    def num_bytes(self) -> float:
        return self.file.size * self.share

    @property
    def content(self) -> float:
        """Bytes before compression, about."""
        return self.num_bytes * self.swells

    @property
    def is_cut(self) -> bool:
        """Whether ranges inside the file can be taken."""
        return self.file.format in ("text", "jsonl", "warc", "parquet") and self.content > _UNIT_BYTES

    @property
    def stratum(self) -> Stratum:
        """What is alike in how much text a byte holds."""
        return (self.file.format, self.file.compression, CUT if self.is_cut else WHOLE)


def extents_of(files: Sequence[File]) -> list[Extent]:
    """All of `files`; the largest of each sort says how much its bytes swell."""
    largest: dict[tuple[str, str], File] = {}
    for file in sorted(files, key=lambda file: file.size):
        largest[file.format, file.compression] = file
    swells = {sort: _swells(file) for sort, file in largest.items()}
    return [Extent(file, swells[file.format, file.compression]) for file in files]


def _swells(file: File) -> float:
    """Bytes before compression a byte of the file."""
    if not file.compression and file.format != "parquet":
        return 1.0
    try:
        if file.format == "parquet":
            with open_raw(file) as raw, parquet.ParquetFile(raw) as table:
                groups = (table.metadata.row_group(number) for number in range(table.metadata.num_row_groups))
                return max(sum(group.total_byte_size for group in groups) / max(file.size, 1), 1.0)
        return max(len(head(file, _UNIT_BYTES)) / max(min(file.size, _UNIT_BYTES), 1), 1.0)
    except HoneError:
        raise
    except BaseException as error:  # it is broken, which reading it will say
        if not poisoned(error):
            raise
        return _USUALLY


class Piece(NamedTuple):
    """A file to read, the number of the range it comes from, and the bytes of the input it is."""

    file: File
    number: int
    stratum: Stratum
    num_bytes: float


class Sample(NamedTuple):
    """`pieces` in order; `weights` says for how many bytes a byte of each stratum stands. `whole`: nothing was left out."""

    pieces: list[Piece]
    weights: dict[Stratum, float]
    whole: bool

    @property
    def num_bytes(self) -> float:
        """Bytes of the input that were taken."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def share(self) -> float:
        """Sampled bytes over all, every byte weighed by what it stands for."""
        stood_for = sum(piece.num_bytes * self.weights[piece.stratum] for piece in self.pieces)
        return 1.0 if self.whole else min(self.num_bytes / max(stood_for, 1.0), 1.0)


def choose(extents: Sequence[Extent], num_bytes: int, options: Options, folder: Path) -> Sample:
    """About `num_bytes` of text of `extents`; parts that must be copied are written into `folder`."""
    total = sum(extent.content for extent in extents)
    if total <= num_bytes and all(extent.share == 1 for extent in extents):
        pieces = [
            Piece(part, number, extent.stratum, part.size)
            for number, extent in enumerate(extents)
            for part in _small_parts(extent.file)
        ]
        return Sample(pieces, dict.fromkeys({piece.stratum for piece in pieces}, 1.0), True)
    folder.mkdir(exist_ok=True)
    certain = _certain(extents, _LARGE_SHARE * num_bytes)
    pieces = []
    seen: Counter[Stratum] = Counter()
    large = sum(extents[number].content for number in certain)
    step = max((total - large) * PIECE_BYTES / (num_bytes - large), PIECE_BYTES)
    cutter = _Cutter(step, options, folder, extents)
    begin = 0.0
    for place, extent in enumerate(extents):
        if place in certain:
            pieces.append(Piece(extent.file, -2 - place, (*extent.stratum[:2], CERTAIN), extent.file.size))
            seen[pieces[-1].stratum] += extent.num_bytes
            continue
        numbers = np.arange(np.ceil((begin - PIECE_BYTES) / step - 0.5), np.ceil((begin + extent.content) / step - 0.5))
        starts = (numbers + 0.5) * step - begin  # in the file; the first range may begin before it
        if not extent.is_cut:
            here = numbers[(starts <= 0) & (starts > -PIECE_BYTES)]
            if len(here):
                pieces.append(Piece(extent.file, int(here[0]), extent.stratum, extent.file.size))
        elif len(numbers):
            pieces += cutter.cut(extent, numbers.astype(int), starts)
        seen[extent.stratum] += extent.num_bytes
        begin += extent.content
    pieces += _missed(extents, seen, {piece.stratum for piece in pieces}, cutter)
    taken: Counter[Stratum] = Counter()
    for piece in pieces:
        taken[piece.stratum] += piece.num_bytes
    return Sample(pieces, {stratum: seen[stratum] / max(size, 1.0) for stratum, size in taken.items()}, False)


def _certain(extents: Sequence[Extent], num_bytes: float) -> set[int]:
    """Places of the largest files that are not cut, of `num_bytes` together at most."""
    places = [place for place, extent in enumerate(extents) if not extent.is_cut and extent.share == 1]
    found = set()
    for place in sorted(places, key=lambda place: -extents[place].content):
        num_bytes -= extents[place].content
        if num_bytes < 0 or extents[place].content < _LARGE * PIECE_BYTES:
            break
        found.add(place)
    return found


def marked(piece: Piece) -> File:
    """The file under a name that tells its piece; files that are not cut have names of their own."""
    if piece.file.format not in ("text", "jsonl", "warc", "parquet"):
        return piece.file
    return replace(piece.file, name=f"{piece.file.name}{_MARK}{piece.number}")


def told(source: str) -> tuple[str, int | None]:
    """(name, number of its piece if it was marked) of a source as `marked` named it."""
    name, mark, number = source.rpartition(_MARK)
    return (name, int(number)) if mark else (source, None)


def _small_parts(file: File) -> list[File]:
    """A file of rows in parts that take little memory; any other as it is."""
    size = 4 << 20
    if file.format != "jsonl" or file.compression or file.size <= size or file.url:
        return [file]
    borders = [*range(0, file.size, size), file.size]
    return [replace(file, size=end - begin, part=(begin, end)) for begin, end in pairwise(borders)]


def _missed(extents: Sequence[Extent], seen: Counter[Stratum], known: set[Stratum], cutter: _Cutter) -> Iterator[Piece]:
    """Something of every stratum that no range fell into: what lies in its middle."""
    for number, stratum in enumerate(sorted(seen.keys() - known), len(extents)):
        whole = seen[stratum]
        before = 0.0
        for extent in extents:
            if extent.stratum == stratum:
                before += extent.num_bytes
                if before >= whole / 2:
                    numbers = np.array([-2 - number])
                    if extent.is_cut:
                        yield from cutter.cut(extent, numbers, np.array([extent.content / 2]))
                    else:
                        yield Piece(extent.file, -2 - number, stratum, extent.file.size)
                    break


def _whole_letters(content: bytes) -> bytes:
    """UTF-8 without the pieces of letters that a cut leaves at both ends."""
    first = next((at for at, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), 0)
    for last in range(1, min(len(content), 4) + 1):
        if content[-last] & 0xC0 != 0x80:
            needs = 1 if content[-last] < 0xC0 else 2 if content[-last] < 0xE0 else 3 if content[-last] < 0xF0 else 4
            return content[first:] if needs <= last else content[first:-last]
    return content[first:]


class _Cutter:
    """Takes ranges out of large files."""

    def __init__(self, step: float, options: Options, folder: Path, extents: Sequence[Extent]) -> None:
        self.options, self.folder = options, folder
        self.stream_bytes = _STREAM_BYTES
        cut = [extent for extent in extents if extent.is_cut]
        tables = sum(extent.content for extent in cut if extent.file.format == "parquet")
        self.table_share = min(_TABLE_BYTES / max(tables, 1.0), 1.0)
        self.row_share = min(PIECE_BYTES / step, 1.0)
        self.copies = 0

    def cut(self, extent: Extent, numbers: np.ndarray, starts: np.ndarray) -> list[Piece]:
        """A piece a range; none where the file is broken, which reading it will say."""
        try:
            if extent.file.format == "parquet":
                return self._table(extent, numbers)
            if extent.file.compression:
                return self._stream(extent, numbers, starts)
            return self._places(extent, numbers, starts)
        except HoneError:
            raise
        except BaseException as error:
            if not poisoned(error):
                raise
            return []

    def _places(self, extent: Extent, numbers: np.ndarray, starts: np.ndarray) -> list[Piece]:
        """Ranges of a file that can be entered anywhere."""
        file, found = extent.file, []
        with open_raw(file) as raw:
            if (mark := marked_as(raw.read(4))) and mark != "utf-8-sig":
                raw.seek(0)
                return [self._piece(extent, numbers[0], raw.read(_UNIT_BYTES), 1.0)]
            border = border_of(file.format, self.options)
            for number, (begin, end) in zip(
                numbers, stretches(raw, border, starts, PIECE_BYTES, int(extent.num_bytes))
            ):
                if end <= begin:
                    continue
                if file.format == "jsonl":
                    part = replace(file, size=end - begin, part=(begin, end))
                    found.append(Piece(part, int(number), extent.stratum, end - begin))
                else:
                    raw.seek(begin)
                    found.append(self._piece(extent, number, raw.read(end - begin), 1.0))
        return found

    def _stream(self, extent: Extent, numbers: np.ndarray, starts: np.ndarray) -> list[Piece]:
        """Ranges of a compressed file, which is read along, as far as that does not take too long."""
        file, found = extent.file, []
        with open_stream(file) as stream:
            content = stream.read(max(self.stream_bytes, _UNIT_BYTES))
            whole = not stream.read(1)
        self.stream_bytes -= len(content)
        swells = len(content) / file.size if whole else extent.swells
        meant = min(len(content), int(swells * extent.num_bytes))
        starts = starts * (meant / max(extent.content, 1))
        lying = io.BytesIO(content)
        border = border_of(file.format, self.options)
        for number, (begin, end) in zip(numbers, stretches(lying, border, starts, PIECE_BYTES, meant)):
            if end > begin:
                found.append(self._piece(extent, number, content[begin:end], swells))
        return found

    def _table(self, extent: Extent, numbers: np.ndarray) -> list[Piece]:
        """Slices of rows of some row groups, evenly spread."""
        file, options = extent.file, self.options
        found = []
        with open_raw(file) as raw, parquet.ParquetFile(raw if file.url else file.path) as table:
            about = table.metadata
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            rows = np.array([group.num_rows for group in groups])
            reach = np.cumsum(rows)
            groups = np.flatnonzero((rows > 0) & (reach - rows < extent.share * about.num_rows))
            sizes = np.array([about.row_group(number).total_byte_size for number in groups.tolist()], float)
            wanted = max(round(len(groups) * self.table_share), min(len(groups), 1))
            chosen = groups[((np.arange(wanted) + 0.5) * len(groups) / wanted).astype(int)]
            more = len(groups) / max(wanted, 1) * self.row_share
            names = [options.text_field, options.url_field, *options.metadata_fields]
            columns = [name for name in dict.fromkeys(names) if name and name.split(".")[0] in table.schema_arrow.names]
            scale = file.size / max(sizes.sum(), 1.0)
            for group in chosen.tolist():
                held = table.read_row_group(group, columns=columns, use_threads=False)
                size = about.row_group(group).total_byte_size
                count = max(round(min(more, 1.0) * size / _SLICE_BYTES), 1)
                each = max(round(min(more, 1.0) * len(held) / count), 1)
                for place in range(count):
                    first = int((place + 0.5) * len(held) / count - each / 2)
                    slice_ = held.slice(max(first, 0), each)
                    path = self._path()
                    parquet.write_table(slice_, path, compression="none")
                    part = File(path, file.name, path.stat().st_size, "parquet")
                    share = len(slice_) / len(held) * size * scale * extent.share
                    found.append(Piece(part, -(_TABLE_NUMBERS + self.copies), extent.stratum, share))
        return found

    def _piece(self, extent: Extent, number: int, content: bytes, swells: float) -> Piece:
        """A copy of a range."""
        size = len(content) / swells
        if extent.file.format == "text" and self.options.encoding in ("utf-8", "utf8"):
            content = _whole_letters(content)
        path = self._path()
        path.write_bytes(content)
        return Piece(File(path, extent.file.name, len(content), extent.file.format), int(number), extent.stratum, size)

    def _path(self) -> Path:
        self.copies += 1
        return self.folder / f"piece-{self.copies:05d}"
