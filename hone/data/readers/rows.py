"""Rows: the texts of jsonl files and Parquet tables in batches, by Arrow where possible."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from hone.base.errors import MissingExtra
from hone.base.lazy import lazy
from hone.data.readers.documents import SAMPLE_CHARS, Fault, Options
from hone.feed.chat import FIELDS, chat_in, rendered
from hone.feed.files.listing import File
from hone.feed.files.remote import is_lost
from hone.feed.files.sniff import marked
from hone.feed.files.streams import MAX_EXPANSION, Salvage, Unreadable, open_raw, open_stream
from hone.text.batch import Texts

pa = lazy("pyarrow")

MAX_ROW_BYTES = 64 << 20
BLOCK_BYTES = 16 << 20
"""About the bytes of text in a batch."""
_MOST_ROWS = 1 << 16
_ENDLESS = 1 << 62
_FREE_TABLE_BYTES = 1 << 30


class Readable(Protocol):
    """A stream to read from; `read` returns fewer bytes only at its end, b'' there."""

    def read(self, size: int) -> bytes: ...


class Rows(NamedTuple):
    """Texts of a file's rows, unchecked. `urls` and `metadata` are None when not requested or absent.

    `places` int64 [n] is the position of each text in the file: the first byte of its line, or the number of its row.
    """

    texts: Texts
    urls: list[str] | None
    metadata: list[str] | None
    places: np.ndarray


def read_jsonl(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a file of JSON objects, one per line; a Fault for each without text."""
    need_arrow("reading jsonl")
    with open_stream(file) as stream:
        place, last = _start(stream, file.part)
        yield from read_blocks(Salvage(stream), options, place, last)


def read_blocks(stream: Readable, options: Options, place: int = 0, last: int = _ENDLESS) -> Iterator[Rows | Fault]:
    """The rows of the lines of `stream` that begin before offset `last`; the first begins at `place`."""
    plain = not options.metadata_fields and "." not in options.text_field + options.url_field
    for block in _blocks(stream, place, last):
        if isinstance(block, Fault):
            yield block
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
        urls = None if column.null_count == len(column) else [url or "" for url in _strings(column)]
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    places = np.concatenate([[0], ends[: num_lines - 1] + 1]) + place
    return Rows(Texts.from_arrow(_one(texts)), urls, None, places)


def _strings(column: Any) -> list[str]:
    """Values of a string column; bytes that are not UTF-8 are replaced."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        return [(value or b"").decode("utf8", "replace") for value in raw]


def _one(column: Any) -> Any:
    """A chunked column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


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


def pick(row: Any, field: str) -> Any:
    """The value of `field` in a JSON object; of 'a.b', unless that is a field, that of b in a. None when it is absent."""
    if not isinstance(row, dict):
        return None
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    return pick(row.get(outer), inner) if dot else None


def described(fields: dict[str, Any]) -> str:
    """The fields that have a value, as JSON; '' when there are none."""
    there = {name: value for name, value in fields.items() if value not in (None, "")}
    return json.dumps(there, sort_keys=True, ensure_ascii=True, default=str) if there else ""


def read_parquet(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a Parquet table, without Python strings; a Fault for each without text."""
    with _opened(file) as table:
        yield from _table_rows(table, file, options)


def row_group_bytes(file: File, options: Options) -> list[int]:
    """Bytes of each row group of a Parquet table before compression. Raises Unreadable like reading."""
    with _opened(file) as table:
        return _sizes(table, file, options)


@contextmanager
def _opened(file: File) -> Iterator[Any]:
    """The table of a Parquet file. Raises Unreadable for an invalid one."""
    need_arrow("reading Parquet")
    from pyarrow import parquet

    try:
        with open_raw(file) as raw, parquet.ParquetFile(raw if file.url or file.held else file.path) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError) or is_lost(error):
            raise
        raise Unreadable("bad_parquet", str(error)) from None


def _sizes(table: Any, file: File, options: Options) -> list[int]:
    """Bytes of each row group. Raises Unreadable for a table without texts, or one that expands too much."""
    text_column(table.schema_arrow, options.text_field)
    sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.metadata.num_row_groups)]
    # Of a part, the whole table was checked when it was cut.
    if file.part is None and sum(sizes) > max(_FREE_TABLE_BYTES, MAX_EXPANSION * file.size):
        raise Unreadable("expands_too_much", f"{file.size} bytes declare {sum(sizes)} bytes of content")
    return sizes


def text_column(schema: Any, text_field: str) -> str:
    """The column with the texts: `text_field`, or where a table has no column 'text' one of conversations.

    Raises Unreadable when there is none.
    """
    chats = FIELDS if text_field == "text" else ()
    for name in (text_field, *chats):
        kind = _type_of(schema, name)
        if kind is not None and (_is_text(kind) or _is_chat(kind)):
            return name
    kind = _type_of(schema, text_field)
    names = ", ".join(schema.names)
    said = f"columns: {names}" if kind is None else f"column {text_field} holds {kind}"
    raise Unreadable("no_text_field", said)


def _table_rows(table: Any, file: File, options: Options) -> Iterator[Rows | Fault]:
    schema = table.schema_arrow
    sizes = _sizes(table, file, options)
    wanted = [text_column(schema, options.text_field), *wanted_columns(schema, options)]
    first, last = file.part or (0, len(sizes))
    counts = [table.metadata.row_group(number).num_rows for number in range(last)]
    place = sum(counts[:first])
    batch_size = int(min(max(BLOCK_BYTES * sum(counts[first:]) // max(sum(sizes[first:last]), 1), 16), _MOST_ROWS))
    groups = list(range(first, last))
    columns = list(dict.fromkeys(wanted))
    for batch in table.iter_batches(batch_size=batch_size, row_groups=groups, columns=columns, use_threads=False):
        yield from batch_rows(batch, schema, place, options)
        place += batch.num_rows


def wanted_columns(schema: Any, options: Options) -> list[str]:
    """The columns of `schema` that `options` asks for besides the text."""
    return [name for name in (options.url_field, *options.metadata_fields) if name and _type_of(schema, name)]


def batch_rows(batch: Any, schema: Any, place: int, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a record batch of a table with `schema`, at `place` and after it; a Fault for each without text."""
    wanted = wanted_columns(schema, options)
    texts = _column(batch, text_column(schema, options.text_field))
    if _is_chat(texts.type):
        texts = pa.array([rendered(value) for value in texts.to_pylist()], pa.large_string())
    texts = _large(texts)
    there = texts.is_valid()
    for _ in range(texts.null_count):
        yield Fault("no_text_field")
    texts = texts.filter(there) if texts.null_count else texts
    valid = there.to_numpy(zero_copy_only=False).nonzero()[0]
    urls = None
    if options.url_field in wanted and _is_text(_type_of(schema, options.url_field)):
        column = _large(_column(batch, options.url_field))
        urls = [url or "" for url in _strings(column.filter(there))]
    metadata = None
    if options.metadata_fields:
        held = {name: _column(batch, name).to_pylist() for name in options.metadata_fields if name in wanted}
        metadata = [described({name: held[name][row] for name in held}) for row in valid]
    if len(texts):
        yield Rows(Texts.from_arrow(texts), urls, metadata, valid + place)


def _is_chat(kind: Any) -> bool:
    """Whether values of this Arrow type are lists of objects."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return lists and pa.types.is_struct(kind.value_type)


def _type_of(schema: Any, field: str) -> Any:
    """The type of a column, or of a field in a struct column ('a.b'); None when there is none."""
    if field in schema.names:
        return schema.field(field).type
    name, *inner = field.split(".")
    if name not in schema.names:
        return None
    kind = schema.field(name).type
    for part in inner:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _column(batch: Any, field: str) -> Any:
    """The array of a column, or of a field in a struct column."""
    if field in batch.schema.names:
        return batch.column(field)
    from pyarrow import compute

    name, *inner = field.split(".")
    return compute.struct_field(batch.column(name), inner)


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def _large(array: Any) -> Any:
    """A string array with 64-bit offsets. Binary values are not decoded: invalid UTF-8 is found later, per row."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        array = array.view(pa.binary()).cast(pa.large_binary())
    if pa.types.is_large_binary(array.type):
        array = array.view(pa.large_string())
    return array


def need_arrow(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra.of(what, "pyarrow", "data") from None
