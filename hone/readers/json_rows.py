"""JSON: the rows of JSON lines by Arrow's parser where possible, and of files of JSON values, which a kernel writes line by line.

JSON has line ends only between values and never inside a string, so that a line end may become a blank, and the comma (or nothing)
between two values a line end. Everything after that is the reader of JSON lines: speed, limits and the errors of single rows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa

from hone.feed.chat import chat_in
from hone.feed.files.listing import File
from hone.feed.files.sniff import marked
from hone.feed.files.streams import Salvage, Unreadable, open_stream
from hone.readers.conversations import chat_rows
from hone.readers.documents import BLOCK_BYTES, MAX_ROW_BYTES, SAMPLE_CHARS, Fault, Options, Rows, described, pick
from hone.readers.tables import strings
from hone.text.batch import Texts

_ENDLESS = 1 << 62
_STEP = 1 << 20


class Readable(Protocol):
    """A stream to read from; `read` returns fewer bytes only at its end, b'' there."""

    def read(self, size: int) -> bytes: ...


def read_jsonl(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a file of JSON objects, one per line; a Fault for each without text."""
    with open_stream(file) as stream:
        place, last = _start(stream, file.part)
        yield from read_blocks(Salvage(stream), options, place, last)


def read_json(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a .json file: JSON lines (as C4, Dolma and RedPajama ship them), an array of rows, or one row or several."""
    if is_lines(file):
        yield from read_jsonl(replace(file, format="jsonl"), options)
        return
    with open_stream(file) as stream:
        mark = marked(stream.peek(4)[:4])
        if mark == "utf-8-sig":
            stream.read(3)
        elif mark:
            raise Unreadable("wrong_encoding", f"JSON in {mark}")
        yield from read_blocks(_OneLine(Salvage(stream)), options)


def is_lines(file: File) -> bool:
    """Whether the first line of `file` is a whole JSON object, so that the file is JSON lines."""
    with open_stream(file) as stream:
        line = b""
        while not line.strip() and len(line) < _STEP:
            line = stream.readline(MAX_ROW_BYTES)
            if not line:
                return False
    line = line.removeprefix(b"\xef\xbb\xbf")
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return line.endswith(b"}\n") and b'"' in line  # one bad row among good ones


class _OneLine:
    """A stream of JSON values, each on one line; `read` like Salvage."""

    def __init__(self, stream: Salvage) -> None:
        from hone.text.one_line import one_line  # imports numba

        self._one_line = one_line
        self._stream = stream
        self._state = np.zeros(5, np.int64)
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, b'' at the end."""
        while not self._ready:
            raw = self._stream.read(_STEP)
            if not raw:
                return b""
            self._ready = self._one_line(np.frombuffer(raw, np.uint8), self._state).tobytes()
        found, self._ready = self._ready[:size], self._ready[size:]
        return found


def read_blocks(stream: Readable, options: Options, place: int = 0, last: int = _ENDLESS) -> Iterator[Rows | Fault]:
    """The rows of the lines of `stream` that begin before offset `last`; the first begins at `place`."""
    plain = not options.metadata_fields and "." not in options.text_field + options.url_field
    number = 0 if place < 4 else None  # of the first row; not known in a later part of a file
    for block in _blocks(stream, place, last):
        if isinstance(block, Fault):
            yield block
            number = None if number is None else number + 1
            continue
        if options.chat:
            yield from _conversations(*block, number, options)
            number = None if number is None else number + sum(bool(line.strip()) for line in block[1].split(b"\n"))
            continue
        rows = _by_arrow(*block, options) if plain else None
        if rows is None:
            yield from _by_line(*block, options)
        else:
            yield rows


def _start(stream: IO[bytes], part: tuple[int, int] | None) -> tuple[int, int]:
    """(offset of the first line of this part, to which the stream is moved; offset from which no line belongs to this part)."""
    if part is not None and part[0]:
        begin, last = part
        place = begin - 1
        stream.seek(place)
        while place < last - 1:
            chunk = stream.read(min(1 << 20, last - 1 - place))
            end = chunk.find(b"\n")
            if end >= 0:
                stream.seek(place + end + 1)
                return place + end + 1, last
            if not chunk:
                break
            place += len(chunk)
        return last, last
    last = _ENDLESS if part is None else part[1]
    mark = marked(stream.peek(4)[:4])  # type: ignore[attr-defined]
    if mark == "utf-8-sig":
        stream.read(3)
        return 3, max(last, 4)  # the byte order mark belongs to the first line
    if mark:
        raise Unreadable("wrong_encoding", f"JSON in {mark}")
    return 0, last


def _blocks(stream: Readable, place: int, last: int) -> Iterator[tuple[int, bytes] | Fault]:
    """(offset, whole lines), about BLOCK_BYTES at a time, of the lines that begin before `last`; the first at `place`.

    A Fault for a line above MAX_ROW_BYTES, which is skipped.
    """
    waiting: list[bytes] = []
    size = 0
    too_long = False
    while place < last:
        # Up to the last byte before `last`; then the rest of that byte's line.
        left = last - place - size
        chunk = stream.read(min(BLOCK_BYTES if not size else 1 << 20, left) if left > 0 else 1 << 16)
        if not chunk:
            break
        if left <= 0:
            end = chunk.find(b"\n")
            chunk = chunk[: end + 1] if end >= 0 else chunk
        end = chunk.find(b"\n") if too_long else chunk.rfind(b"\n")
        if end < 0:
            waiting = [] if too_long else [*waiting, chunk]
            size += len(chunk)
            if size > MAX_ROW_BYTES:
                waiting, too_long = [], True
            continue
        if too_long:
            yield Fault("row_too_long", "", size + end)
            place, chunk, too_long, size = place + size + end + 1, chunk[end + 1 :], False, 0
            end = chunk.rfind(b"\n")
        if end >= 0:
            yield place, b"".join([*waiting, chunk[: end + 1]])
            place += size + end + 1
            waiting, size, chunk = [], 0, chunk[end + 1 :]
        waiting, size = [chunk] if chunk else [], len(chunk)
    if too_long:
        yield Fault("row_too_long", "", size)
    elif waiting and place < last:
        yield place, b"".join(waiting)


def _by_arrow(place: int, block: bytes, options: Options) -> Rows | None:
    """The rows of the lines from offset `place`, by Arrow's parser; None when it fails or a line's text is not a string."""
    from pyarrow import json as arrow_json

    names = [options.text_field, *([options.url_field] if options.url_field else [])]
    schema = pa.schema([(name, pa.large_string()) for name in dict.fromkeys(names)])
    try:
        table = arrow_json.read_json(
            io.BytesIO(block),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowException:
        return None
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    texts = table.column(options.text_field)
    if len(table) != num_lines or texts.null_count:
        return None
    urls = None
    if options.url_field and options.url_field != options.text_field:
        column = table.column(options.url_field)
        urls = None if column.null_count == len(column) else [url or "" for url in strings(column)]
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    places = np.concatenate([[0], ends[: num_lines - 1] + 1]) + place
    return Rows(Texts.from_arrow(_one(texts)), urls, None, places)


def _one(column: Any) -> Any:
    """A chunked column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _conversations(place: int, block: bytes, number: int | None, options: Options) -> Iterator[Rows | Fault]:
    """The conversations in the lines from offset `place`, after the first `number` (None: not known) of the file."""
    rows: list[tuple[int, str, Any]] = []
    for line in block.split(b"\n"):
        here, place = place, place + len(line) + 1
        if not line.strip():
            continue
        number = None if number is None else number + 1
        name = f"the row at byte {here}" if number is None else f"row {number}"
        try:
            rows.append((here, name, json.loads(line)))
        except (ValueError, RecursionError) as error:
            yield Fault("bad_json", f"{name}: {error}", len(line))
    yield from chat_rows(rows, options)


def _by_line(place: int, block: bytes, options: Options) -> Iterator[Rows | Fault]:
    """The rows of the lines from offset `place`, one by one, and a Fault for each invalid line."""
    places: list[int] = []
    following = place
    texts: list[str] = []
    urls: list[str] = []
    metadata: list[str] = []
    for line in block.split(b"\n"):
        place, following = following, following + len(line) + 1
        if not line.strip():
            continue
        shown = line[:SAMPLE_CHARS].decode("utf8", "replace").rstrip()
        if len(line) > MAX_ROW_BYTES:
            yield Fault("row_too_long", shown, len(line))
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            yield Fault("wrong_encoding", shown, len(line))
            continue
        except (ValueError, RecursionError):
            yield Fault("bad_json", shown, len(line))
            continue
        text = pick(row, options.text_field)
        if not isinstance(text, str):
            text = chat_in(row, options.text_field)
        if text is None:
            yield Fault("no_text_field", shown, len(line))
            continue
        try:
            text.encode("utf8")
        except UnicodeEncodeError:
            yield Fault("lone_surrogate", text[:SAMPLE_CHARS], len(line))
            continue
        texts.append(text)
        places.append(place)
        url = pick(row, options.url_field) if options.url_field else None
        urls.append(url.encode("utf8", "replace").decode() if isinstance(url, str) else "")
        metadata.append(described({name: pick(row, name) for name in options.metadata_fields}))
    if texts:
        described_rows = metadata if options.metadata_fields else None
        yield Rows(Texts.of(texts), urls if any(urls) else None, described_rows, np.array(places, np.int64))
