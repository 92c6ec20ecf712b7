"""CSV: the rows of tables with a header line, separated by commas, semicolons, tabs or bars."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO

import numpy as np

from hone.feed.files.listing import File
from hone.feed.files.streams import Salvage, Unreadable, open_stream
from hone.readers.documents import BLOCK_BYTES, MAX_ROW_BYTES, SAMPLE_CHARS, Fault, Options, Rows, described
from hone.readers.encodings import decode_text, decoder_of
from hone.text.batch import Texts

_SEPARATORS = {"csv": ",;\t|", "tsv": "\t,;|"}
_STEP = 1 << 20


def read_csv(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a table whose first line names its columns; a Fault for each without text or with other columns.

    The separator is the first of comma, semicolon, tab and bar (tab first for .tsv) by which the header has a column called
    `text_field`. Values may be quoted, with line ends inside. Undecodable bytes cost their own row. Of a truncated stream the
    rows before its end are returned, then EOFError is raised. Raises Unreadable.
    """
    with open_stream(file) as buffered:
        stream = _Decoded(buffered, options.encoding)
        first = stream.line()
        if not first.strip():
            return
        separator = _separator(first, options.text_field, ".tsv" in file.name.lower())
        # A stray quotation mark takes all that follows as one value: the limit ends that.
        before = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            yield from _rows(_lasting(csv.reader(stream.lines(first), delimiter=separator), stream), stream, options)
        finally:
            csv.field_size_limit(before)


def _lasting(reader: Iterator[list[str]], stream: _Decoded) -> Iterator[list[str]]:
    """The rows before an error, which is kept in `stream`."""
    try:
        yield from reader
    except csv.Error as error:
        stream.error = Unreadable("bad_csv", str(error))
    except Unreadable as error:
        stream.error = error


def _separator(line: str, text_field: str, tabs: bool) -> str:
    for separator in _SEPARATORS["tsv" if tabs else "csv"]:
        if text_field in _names(next(csv.reader([line], delimiter=separator), [])):
            return separator
    raise Unreadable("no_text_field", f"columns: {line.strip()[:SAMPLE_CHARS]}")


def _names(header: list[str]) -> list[str]:
    return [name.strip() for name in header]


def _rows(reader: Iterator[list[str]], stream: _Decoded, options: Options) -> Iterator[Rows | Fault]:
    header = _names(next(reader))
    column = {name: number for number, name in reversed(list(enumerate(header)))}
    at = column[options.text_field]
    url = column.get(options.url_field, -1)
    about = [(name, column[name]) for name in options.metadata_fields if name in column]
    texts: list[str] = []
    urls: list[str] = []
    metadata: list[str] = []
    places: list[int] = []
    size = 0

    def gathered() -> Rows:
        return Rows(
            Texts.of(texts),
            urls if url >= 0 else None,
            metadata if options.metadata_fields else None,
            np.array(places, np.int64),
        )

    for number, row in enumerate(reader):
        if not row:
            continue
        if len(row) != len(header):
            yield Fault("bad_row", f"{len(row)} columns, not {len(header)}: {','.join(row)}"[:SAMPLE_CHARS])
            continue
        text = stream.settled(row[at])
        if text is None:
            shown = row[at][:SAMPLE_CHARS].encode("utf8", "replace").decode()
            yield Fault("wrong_encoding", shown, len(row[at]))
            continue
        texts.append(text)
        places.append(number)
        if url >= 0:
            urls.append(stream.settled(row[url]) or "")
        metadata.append(described({name: stream.settled(row[place]) for name, place in about}) if about else "")
        size += len(text)
        if size >= BLOCK_BYTES:
            yield gathered()
            texts, urls, metadata, places, size = [], [], [], [], 0
    if texts:
        yield gathered()
    if stream.error is not None:
        raise stream.error
    if stream.truncated:
        raise EOFError("the compressed stream is truncated")


class _Decoded:
    """The lines of a stream; bytes that cannot be decoded stand as surrogates until their row is known."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self.truncated = False
        self.error: Unreadable | None = None
        salvage = Salvage(stream)  # type: ignore[arg-type]
        start = salvage.read(4)
        decoder, begin = decoder_of(start, encoding)
        self._auto = encoding == "auto"
        self._encoding = decoder.encoding
        raw = io.BufferedReader(_Joined(start[begin:], salvage, self), _STEP)
        self._text = io.TextIOWrapper(raw, self._encoding, "surrogateescape", newline="")

    def line(self) -> str:
        """The next line, with its end."""
        line = self._text.readline(MAX_ROW_BYTES)
        if len(line) >= MAX_ROW_BYTES:
            raise Unreadable("row_too_long", line[:SAMPLE_CHARS])
        return line

    def lines(self, first: str) -> Iterator[str]:
        """`first` and all following lines."""
        line = first
        while line:
            yield line
            line = self.line()

    def settled(self, value: str) -> str | None:
        """A value with its encoding detected where it has to be; None when it cannot be decoded."""
        if value.isascii():
            return value
        try:
            value.encode("utf8")
            return value
        except UnicodeEncodeError:
            if not self._auto:
                return None
        try:
            return decode_text(value.encode(self._encoding, "surrogateescape"), "auto")
        except UnicodeError:
            return None


class _Joined(io.RawIOBase):
    """`start`, then the rest of `stream`; a truncation ends it and is noted in `reader`."""

    def __init__(self, start: bytes, stream: Salvage, reader: _Decoded) -> None:
        self._start, self._stream, self._reader = start, stream, reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        found, self._start = self._start, b""
        if not found:
            try:
                found = self._stream.read(len(buffer))
            except EOFError:
                self._reader.truncated = True
        buffer[: len(found)] = found
        return len(found)
