"""JSON values: files of one JSON document, an array of rows, or values one after the other, read as JSON lines.

A kernel writes each value on a line of its own: JSON has line ends only between values and never inside a string, so that
a line end may become a blank, and the comma (or nothing) between two values a line end. Everything after that is the
reader of JSON lines: speed, limits and the errors of single rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hone.data.readers.documents import Fault, Options
from hone.data.readers.rows import MAX_ROW_BYTES, Rows, read_blocks, read_jsonl
from hone.feed.files.listing import File
from hone.feed.files.sniff import marked
from hone.feed.files.streams import Salvage, Unreadable, open_stream

_STEP = 1 << 20


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
