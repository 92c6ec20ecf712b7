"""Rows: the texts of jsonl files and Parquet tables in batches, read by Arrow where it can."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from hone.base.errors import MissingExtra
from hone.base.lazy import lazy
from hone.data.readers.documents import SAMPLE_CHARS, Fault, Options, Unreadable
from hone.data.readers.encodings import marked
from hone.data.readers.listing import File
from hone.data.readers.remote import is_lost
from hone.data.readers.streams import MAX_EXPANSION, open_raw, open_stream
from hone.data.text.batch import Texts

pa = lazy("pyarrow")

MAX_ROW_BYTES = 64 << 20
BLOCK_BYTES = 16 << 20
"""Text in a batch, about."""
_MOST_ROWS = 1 << 16
_FREE_TABLE_BYTES = 1 << 30


class Rows(NamedTuple):
    """Texts as a file's rows hold them, unchecked. `urls` and `metadata` are None where nothing was asked for or is there."""

    texts: Texts
    urls: list[str] | None
    metadata: list[str] | None


def read_jsonl(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a file of JSON objects, a line each; a Fault for each that has no text."""
    _need_arrow("reading jsonl")
    plain = not options.metadata_fields and "." not in options.text_field + options.url_field
    with open_stream(file) as stream:
        for block in _blocks(stream):
            if isinstance(block, Fault):
                yield block
                continue
            rows = _by_arrow(block, options) if plain else None
            if rows is None:
                yield from _by_line(block, options)
            else:
                yield rows


def _blocks(stream: IO[bytes]) -> Iterator[bytes | Fault]:
    """Whole lines, about BLOCK_BYTES at a time; a Fault for a line above MAX_ROW_BYTES, which is passed over."""
    mark = marked(stream.peek(4)[:4])  # type: ignore[attr-defined]
    if mark == "utf-8-sig":
        stream.read(3)
    elif mark:
        raise Unreadable("wrong_encoding", f"JSON in {mark}")
    waiting: list[bytes] = []
    size = 0
    too_long = False
    while chunk := stream.read(BLOCK_BYTES if not size else 1 << 20):
        if too_long:
            end = chunk.find(b"\n")
            if end < 0:
                size += len(chunk)
                continue
            yield Fault("row_too_long", "", size + end)
            chunk, too_long, size = chunk[end + 1 :], False, 0
        end = chunk.rfind(b"\n")
        if end < 0:
            waiting.append(chunk)
            size += len(chunk)
            if size > MAX_ROW_BYTES:
                waiting, too_long = [], True
            continue
        yield b"".join([*waiting, chunk[: end + 1]])
        waiting = [chunk[end + 1 :]] if end + 1 < len(chunk) else []
        size = len(chunk) - end - 1
    if too_long:
        yield Fault("row_too_long", "", size)
    elif waiting:
        yield b"".join(waiting)


def _by_arrow(block: bytes, options: Options) -> Rows | None:
    """The rows by Arrow's parser; None when it stumbles over any of them or finds anything but a text in each line."""
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
    return Rows(Texts.from_arrow(_one(texts)), urls, None)


def _strings(column: Any) -> list[str]:
    """Values of a string column; bytes that are no UTF-8 do not stop it."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        return [(value or b"").decode("utf8", "replace") for value in raw]


def _one(column: Any) -> Any:
    """A column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _by_line(block: bytes, options: Options) -> Iterator[Rows | Fault]:
    """The rows one by one, with what is wrong with each that is none."""
    texts: list[str] = []
    urls: list[str] = []
    metadata: list[str] = []
    for line in block.split(b"\n"):
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
            yield Fault("no_text_field", shown, len(line))
            continue
        try:
            text.encode("utf8")
        except UnicodeEncodeError:
            yield Fault("lone_surrogate", text[:SAMPLE_CHARS], len(line))
            continue
        texts.append(text)
        url = pick(row, options.url_field) if options.url_field else None
        urls.append(url.encode("utf8", "replace").decode() if isinstance(url, str) else "")
        metadata.append(described({name: pick(row, name) for name in options.metadata_fields}))
    if texts:
        yield Rows(Texts.of(texts), urls if any(urls) else None, metadata if options.metadata_fields else None)


def pick(row: Any, field: str) -> Any:
    """The value of `field` in a JSON object; of 'a.b', which is no field itself, that of b in a. None when it is absent."""
    if not isinstance(row, dict):
        return None
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    return pick(row.get(outer), inner) if dot else None


def described(fields: dict[str, Any]) -> str:
    """Fields that have a value as JSON; '' when none has."""
    there = {name: value for name, value in fields.items() if value not in (None, "")}
    return json.dumps(there, sort_keys=True, ensure_ascii=True, default=str) if there else ""


def read_parquet(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a Parquet table, without a Python string each; a Fault for each that has no text."""
    _need_arrow("reading Parquet")
    from pyarrow import parquet

    try:
        with open_raw(file) as raw, parquet.ParquetFile(raw if file.url else file.path) as table:
            yield from _table_rows(table, file, options)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError) or is_lost(error):
            raise
        raise Unreadable("bad_parquet", str(error)) from None


def _table_rows(table: Any, file: File, options: Options) -> Iterator[Rows | Fault]:
    schema = table.schema_arrow
    wanted = [name for name in (options.url_field, *options.metadata_fields) if name and _type_of(schema, name)]
    kind = _type_of(schema, options.text_field)
    if kind is None or not _is_text(kind):
        said = f"columns: {', '.join(schema.names)}" if kind is None else f"column {options.text_field} holds {kind}"
        raise Unreadable("no_text_field", said)
    groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if size > _FREE_TABLE_BYTES and size > MAX_EXPANSION * file.size:
        raise Unreadable("expands_too_much", f"{file.size} bytes say they hold {size}")
    num_rows = max(table.metadata.num_rows, 1)
    batch_size = int(min(max(BLOCK_BYTES * num_rows // max(size, 1), 16), _MOST_ROWS))
    columns = list(dict.fromkeys([options.text_field, *wanted]))
    for batch in table.iter_batches(batch_size=batch_size, columns=columns, use_threads=False):
        texts = _large(_column(batch, options.text_field))
        there = texts.is_valid()
        for _ in range(texts.null_count):
            yield Fault("no_text_field")
        texts = texts.filter(there) if texts.null_count else texts
        urls = None
        if options.url_field in wanted and _is_text(_type_of(schema, options.url_field)):
            column = _large(_column(batch, options.url_field))
            urls = [url or "" for url in _strings(column.filter(there))]
        metadata = None
        if options.metadata_fields:
            held = {name: _column(batch, name).to_pylist() for name in options.metadata_fields if name in wanted}
            valid = there.to_numpy(zero_copy_only=False).nonzero()[0]
            metadata = [described({name: held[name][row] for name in held}) for row in valid]
        if len(texts):
            yield Rows(Texts.from_arrow(texts), urls, metadata)


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
    """A string array with 64-bit offsets. Bytes are taken as they are: what is no UTF-8 is found later, by row."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        array = array.view(pa.binary()).cast(pa.large_binary())
    if pa.types.is_large_binary(array.type):
        array = array.view(pa.large_string())
    return array


def _need_arrow(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra.of(what, "pyarrow", "data") from None
