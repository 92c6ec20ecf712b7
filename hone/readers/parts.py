"""Parts: splits a large file into several tasks, by its own sizes alone; the parts in order are the whole file.

jsonl, also in a .json file, is cut at multiples of PART_BYTES: a line belongs to the part in which its first byte is. Parquet
is cut between row groups, Arrow files between record batches, zip files between members. Documents are numbered by their
position in the file (byte or row) or member, so that cuts do not change ids. Compressed streams and archives cannot be read from
the middle, and texts and pages are read whole: these are not cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hone.base.errors import HoneError
from hone.feed.files.listing import File
from hone.feed.files.sniff import marked
from hone.feed.files.streams import Unreadable, open_raw
from hone.readers.documents import Options, poisoned
from hone.readers.formats.containers import member_bytes
from hone.readers.json_rows import is_lines
from hone.readers.tables import num_batches, row_group_bytes

PART_BYTES = 64 << 20
"""About the bytes of text of a part; for Parquet the bytes of its columns before compression."""
_PACKED = 8
"""Parquet and zip files from PART_BYTES / _PACKED on are opened to find the sizes of what is in them."""


def parts(file: File, options: Options, part_bytes: int | None = None) -> list[File]:
    """`file` cut into parts of about `part_bytes`, in order; only itself when it is small or cannot be cut or read."""
    part_bytes = part_bytes or PART_BYTES
    if file.format in ("json", "jsonl") and not file.compression and file.size > part_bytes:
        return _by_bytes(file, part_bytes)
    if file.format == "parquet" and file.size > part_bytes // _PACKED:
        return _by_units(file, lambda: row_group_bytes(file, options), part_bytes)
    if file.format == "arrow" and file.size > part_bytes:
        return _by_units(file, lambda: _even(file, num_batches(file)), part_bytes)
    if file.format == "zip" and file.size > part_bytes // _PACKED:
        return _by_units(file, lambda: member_bytes(file), part_bytes // _PACKED)
    return [file]


def _even(file: File, count: int) -> list[int]:
    return [file.size // max(count, 1)] * count


def _by_bytes(file: File, part_bytes: int) -> list[File]:
    try:
        if file.format == "json" and not is_lines(file):
            return [file]
        with open_raw(file) as raw:
            mark = marked(raw.read(4))
    except HoneError:
        raise
    except OSError:  # reading it reports the error
        return [file]
    if mark and mark != "utf-8-sig":
        return [file]
    borders = [*range(0, file.size, part_bytes), file.size]
    return [replace(file, format="jsonl", size=end - begin, part=(begin, end)) for begin, end in pairwise(borders)]


def _by_units(file: File, sizes_of: Callable[[], list[int]], part_bytes: int) -> list[File]:
    """Cut between row groups, record batches or members, of which `sizes_of` gives the sizes."""
    try:
        sizes = sizes_of()
    except Unreadable:
        return [file]
    except BaseException as error:
        if not poisoned(error):
            raise
        return [file]
    total = max(sum(sizes), 1)
    found: list[File] = []
    begin = held = before = 0
    for number, size in enumerate(sizes):
        held += size
        if held - before >= part_bytes or number == len(sizes) - 1:
            share = file.size * held // total - file.size * before // total
            found.append(replace(file, size=share, part=(begin, number + 1)))
            begin, before = number + 1, held
    return found if len(found) > 1 else [file]
