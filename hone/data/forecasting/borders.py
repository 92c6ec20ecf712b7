"""Borders: where rows, records and documents begin in a file, so that a range can be taken out of its middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import IO

from hone.data.readers.documents import Options
from hone.data.readers.read import END_OF_TEXT

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 16 << 20
"""A stretch is cut here."""
_RECORD = b"\r\n\r\nWARC/"

Border = Callable[[IO[bytes], int, int], int]
"""(stream, place, size of the stream): the first border at `place` or behind it; the size where there is none."""


def border_of(format_: str, options: Options) -> Border:
    """What parts a file of this format."""
    if format_ == "jsonl":
        return lambda stream, place, size: _after(stream, b"\n", 1, place, size, size)
    if format_ == "warc":
        return lambda stream, place, size: _after(stream, _RECORD, 4, place, size, size)

    def of_text(stream: IO[bytes], place: int, size: int) -> int:
        """Behind the mark that parts documents; without one near, where a text of the greatest length would be cut."""
        most, mark = options.max_document_chars, END_OF_TEXT.encode()
        found = _after(stream, mark, len(mark), place, size, place + most)
        return found if found < size or place + most >= size else min(-(-place // most) * most, size)

    return of_text


def stretches(
    stream: IO[bytes], border: Border, starts: Sequence[float], length: int, size: int
) -> Iterator[tuple[int, int]]:
    """(begin, end) of what begins in [start, start + length), for each start; equal where nothing does."""
    last = 0
    for start in map(int, starts):
        begin = max(border(stream, min(max(start, 0), size), size), last)
        end = begin
        if start + length > 0 and begin < min(start + length, size):
            end = min(border(stream, min(start + length, size), size), begin + _MOST_BYTES)
        last = end
        yield begin, end


def _after(stream: IO[bytes], mark: bytes, kept: int, place: int, size: int, last: int) -> int:
    """The first place from `place` on that lies `kept` bytes behind the beginning of a `mark`; `size` where none is before `last`."""
    if place <= 0 or place >= size:
        return max(min(place, size), 0)
    at = place - kept
    stream.seek(max(at, 0))
    at = max(at, 0)
    rest = b""
    while at < last:
        chunk = stream.read(_CHUNK_BYTES)
        if not chunk:
            break
        found = (rest + chunk).find(mark)
        if found >= 0:
            return min(at - len(rest) + found + kept, size)
        at += len(chunk)
        rest = (rest + chunk)[1 - len(mark) :] if len(mark) > 1 else b""
    return size
