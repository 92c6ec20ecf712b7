"""Arrow: tables in the IPC format, as files (Feather 2) and as streams (the caches of Hugging Face data sets)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hone.base.lazy import lazy
from hone.data.readers.documents import Fault, Options
from hone.data.readers.rows import BLOCK_BYTES, Rows, batch_rows, need_arrow, text_column
from hone.feed.files.listing import File
from hone.feed.files.remote import is_lost
from hone.feed.files.streams import MAX_EXPANSION, Unreadable, open_raw

pa = lazy("pyarrow")

_MAGIC = b"ARROW1"
_FREE_BYTES = 1 << 30
_BATCH_BITS = 32
"""A row's place is its batch's number, moved by so many bits, and its number in the batch: the same in every part of a file."""


def read_arrow(file: File, options: Options) -> Iterator[Rows | Fault]:
    """The rows of an Arrow file or stream; a Fault for each without text. Of a truncated stream, the batches before the end."""
    with _opened(file) as (table, is_file):
        text_column(table.schema, options.text_field)
        number = file.part[0] if file.part else 0
        while True:
            if is_file and number == (file.part[1] if file.part else table.num_record_batches):
                return
            try:
                batch = table.get_batch(number) if is_file else table.read_next_batch()
            except StopIteration:
                return
            if batch.nbytes > max(_FREE_BYTES, MAX_EXPANSION * file.size):
                raise Unreadable("expands_too_much", f"{file.size} bytes expanded to {batch.nbytes} in one batch")
            step = max(batch.num_rows * BLOCK_BYTES // max(batch.nbytes, 1), 16)
            for first in range(0, batch.num_rows, step):
                place = (number << _BATCH_BITS) + first
                yield from batch_rows(batch.slice(first, step), table.schema, place, options)
            number += 1


def num_batches(file: File) -> int:
    """The record batches of an Arrow file, which can be read one by one; 1 for a stream. Raises Unreadable."""
    with _opened(file) as (table, is_file):
        return table.num_record_batches if is_file else 1


@contextmanager
def _opened(file: File) -> Iterator[tuple[Any, bool]]:
    """(the reader of a table, whether it is a file with an index). Raises Unreadable for an invalid one."""
    need_arrow("reading Arrow files")
    try:
        with open_raw(file) as raw:
            is_file = raw.read(len(_MAGIC)) == _MAGIC
            raw.seek(0)
            yield (pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)), is_file
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError) or is_lost(error):
            raise
        raise Unreadable("bad_arrow", str(error)) from None
