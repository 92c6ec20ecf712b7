"""Tables: the rows of Parquet files and of Arrow's IPC format, as files (Feather 2) and streams (the caches of Hugging Face data sets)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import compute, parquet

from hone.feed.chat import FIELDS, rendered
from hone.feed.files.listing import File
from hone.feed.files.remote import is_lost
from hone.feed.files.streams import MAX_EXPANSION, Unreadable, open_raw
from hone.readers.conversations import chat_rows
from hone.readers.documents import BLOCK_BYTES, Fault, Options, Rows, described
from hone.text.batch import Texts

_MOST_ROWS = 1 << 16
_FREE_TABLE_BYTES = 1 << 30
_MAGIC = b"ARROW1"
_BATCH_BITS = 32
"""A row's place is its batch's number, moved by so many bits, and its number in the batch: the same in every part of a file."""


def read_parquet(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of a Parquet table, without Python strings; a Fault for each without text."""
    with _parquet(file) as table:
        yield from _table_rows(table, file, options)


def row_group_bytes(file: File, options: Options) -> list[int]:
    """Bytes of each row group of a Parquet table before compression. Raises Unreadable like reading."""
    with _parquet(file) as table:
        return _sizes(table, file, options)


def read_arrow(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of an Arrow file or stream; a Fault for each without text. Of a truncated stream, the batches before the end."""
    with _arrow(file) as (table, is_file):
        _need_texts(table.schema, options)
        number = file.part[0] if file.part else 0
        while True:
            if is_file and number == (file.part[1] if file.part else table.num_record_batches):
                return
            try:
                batch = table.get_batch(number) if is_file else table.read_next_batch()
            except StopIteration:
                return
            if batch.nbytes > max(_FREE_TABLE_BYTES, MAX_EXPANSION * file.size):
                raise Unreadable("expands_too_much", f"{file.size} bytes expanded to {batch.nbytes} in one batch")
            step = max(batch.num_rows * BLOCK_BYTES // max(batch.nbytes, 1), 16)
            for first in range(0, batch.num_rows, step):
                place = (number << _BATCH_BITS) + first
                yield from batch_rows(batch.slice(first, step), table.schema, place, options)
            number += 1


def num_batches(file: File) -> int:
    """The record batches of an Arrow file, which can be read one by one; 1 for a stream. Raises Unreadable."""
    with _arrow(file) as (table, is_file):
        return table.num_record_batches if is_file else 1


@contextmanager
def _parquet(file: File) -> Iterator[Any]:
    """The table of a Parquet file. Raises Unreadable for an invalid one."""
    try:
        with open_raw(file) as raw, parquet.ParquetFile(raw if file.url or file.held else file.path) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError) or is_lost(error):
            raise
        raise Unreadable("bad_parquet", str(error)) from None


@contextmanager
def _arrow(file: File) -> Iterator[tuple[Any, bool]]:
    """(the reader of a table, whether it is a file with an index). Raises Unreadable for an invalid one."""
    try:
        with open_raw(file) as raw:
            is_file = raw.read(len(_MAGIC)) == _MAGIC
            raw.seek(0)
            yield (pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)), is_file
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError) or is_lost(error):
            raise
        raise Unreadable("bad_arrow", str(error)) from None


def _sizes(table: Any, file: File, options: Options) -> list[int]:
    """Bytes of each row group. Raises Unreadable for a table without texts, or one that expands too much."""
    _need_texts(table.schema_arrow, options)
    sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.metadata.num_row_groups)]
    # Of a part, the whole table was checked when it was cut.
    if file.part is None and sum(sizes) > max(_FREE_TABLE_BYTES, MAX_EXPANSION * file.size):
        raise Unreadable("expands_too_much", f"{file.size} bytes declare {sum(sizes)} bytes of content")
    return sizes


def _need_texts(schema: Any, options: Options) -> None:
    """Raises Unreadable for a table without a column of texts; of conversations every row says what it lacks."""
    if not options.chat:
        text_column(schema, options.text_field)


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
    wanted = schema.names
    if not options.chat:
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
    if options.chat:
        rows = ((place + count, f"row {place + count + 1}", row) for count, row in enumerate(batch.to_pylist()))
        yield from chat_rows(rows, options)
        return
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
        urls = [url or "" for url in strings(column.filter(there))]
    metadata = None
    if options.metadata_fields:
        held = {name: _column(batch, name).to_pylist() for name in options.metadata_fields if name in wanted}
        metadata = [described({name: held[name][row] for name in held}) for row in valid]
    if len(texts):
        yield Rows(Texts.from_arrow(texts), urls, metadata, valid + place)


def strings(column: Any) -> list[str]:
    """Values of a string column; bytes that are not UTF-8 are replaced."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        return [(value or b"").decode("utf8", "replace") for value in raw]


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
