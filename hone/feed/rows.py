"""Rows of a file of texts or conversations, by its format: JSON lines, JSON, Parquet. One function a format (`hone.feed.ROWS`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from hone.feed.chat import FIELDS

_BETWEEN = re.compile(r"[\s,\[\]]*")
"""What stands between the rows of a JSON file: an array's signs, or line ends."""


def lines(stream: IO[bytes], problems: Counter[str]) -> Iterator[Any]:
    """The values of JSON lines; a line that is none is counted in `problems`."""
    for line in stream:
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            problems[f"no JSON: {line[:40].decode('utf8', 'replace').strip()}"] += 1


def values(stream: IO[bytes], problems: Counter[str]) -> Iterator[Any]:
    """The values of a JSON file: those of an array, or one after the other. After one that is none the next line is tried."""
    text, decoder, place = stream.read().decode("utf-8-sig", "replace"), json.JSONDecoder(), 0
    while (place := _BETWEEN.match(text, place).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, place = decoder.raw_decode(text, place)
            yield value
        except (ValueError, RecursionError):
            problems[f"no JSON: {text[place : place + 40].strip()}"] += 1
            place = text.find("\n", place) + 1 or len(text)


def table(stream: IO[bytes], problems: Counter[str]) -> Iterator[Any]:
    """The rows of a Parquet table, texts and conversations alone where it has such columns. Raises EOFError for a damaged one."""
    import pyarrow as pa
    from pyarrow import parquet

    wanted = ("text", *FIELDS, "tools")
    try:
        with parquet.ParquetFile(stream) as found:
            names = [name for name in found.schema_arrow.names if name in wanted]
            for batch in found.iter_batches(batch_size=256, columns=names or None, use_threads=False):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise EOFError(f"no Parquet table: {error}") from None
