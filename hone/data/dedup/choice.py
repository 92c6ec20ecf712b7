"""Choice: which copy of a group of duplicates stays, as numbers that are lower for a better copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import numpy as np

from hone.base.errors import SpecError, did_you_mean
from hone.base.lazy import lazy
from hone.data.corpus import Corpus

parquet = lazy("pyarrow.parquet")

LOWEST_ID = "lowest_id"
WITH_COLUMN = ("newest", "highest", "lowest")
KINDS = (LOWEST_ID, "first", "longest", *WITH_COLUMN, "source")
_LAST = np.uint64(2**64 - 1)


def ranks(keep: str, column: str, sources: tuple[str, ...], corpus: Corpus, wanted: np.ndarray) -> np.ndarray | None:
    """A rank (uint64 [num_documents]) for each document in `wanted` (bool): the copy with the lowest stays, of equal ones that
    with the lowest id. None for 'lowest_id'.

    Documents without a number or a date are last. Raises SpecError when `column` holds no numbers or no date that can be read, or
    `sources` names one that the corpus has not.
    """
    count = len(corpus)
    if keep == LOWEST_ID or not wanted.any():
        return None
    if keep == "first":
        return np.arange(count, dtype=np.uint64)
    if keep == "longest":
        return _LAST - corpus.columns["bytes"].astype(np.uint64)
    if keep == "source":
        return _by_source(sources, corpus)
    if keep == "newest":
        return _by_date(column, corpus, wanted)
    values = _numbers(column, corpus, wanted)
    return ascending(values if keep == "lowest" else -values)


def ascending(values: np.ndarray) -> np.ndarray:
    """Numbers (uint64 [n]) in the order of `values` (float [n]); NaN is last."""
    bits = (values.astype(np.float64) + 0.0).view(np.uint64)  # + 0: there is one zero
    negative = bits >> np.uint64(63) == 1
    ordered = np.where(negative, ~bits, bits | np.uint64(1 << 63))
    return np.where(np.isnan(values), _LAST, ordered)


def _by_source(sources: tuple[str, ...], corpus: Corpus) -> np.ndarray:
    """The position of each document's group in `sources`; of others, the number of `sources`."""
    names, codes = corpus.labels("group")
    place = {name.rstrip("/"): number for number, name in reversed([*enumerate(sources)])}
    known = {name.rstrip("/") for name in names}
    unknown = [name for name in place if name not in known]
    if unknown:
        raise SpecError(
            f"dedup.sources names '{unknown[0]}', of which there is no document",
            fix=f"{did_you_mean(unknown[0], known)}the sources (top folders) are: {', '.join(names[:20])}",
        )
    return np.array([place.get(name.rstrip("/"), len(sources)) for name in names], np.uint64)[codes]


def _numbers(column: str, corpus: Corpus, wanted: np.ndarray) -> np.ndarray:
    """The values (float64 [num_documents]) of a signal, a score or a number in the metadata; NaN where there is none."""
    if column in corpus.columns:
        values = corpus.columns[column]
        if values.dtype.kind not in "iufb":
            raise SpecError(
                f"dedup.column = '{column}' holds no numbers", fix="name a signal, such as words, or a scorer's column"
            )
        return values.astype(np.float64)
    values = np.full(len(corpus), np.nan)
    for index, value in _metadata(column, corpus, wanted):
        if isinstance(value, int | float):
            values[index] = value
    return values


def _by_date(column: str, corpus: Corpus, wanted: np.ndarray) -> np.ndarray:
    """Newest first; a document without a date that can be read is last."""
    times = np.full(len(corpus), np.nan)
    value, read = None, False
    for index, value in _metadata(column, corpus, wanted):
        times[index] = seconds(value)
        read |= not np.isnan(times[index])
    if value is not None and not read:
        raise SpecError(
            f"dedup.column = '{column}': no date in it can be read, one is {json.dumps(value)[:80]}",
            fix="dates are ISO 8601 (2024-05-01), RFC 2822, or seconds since 1970",
        )
    return ascending(-times)


def _metadata(column: str, corpus: Corpus, wanted: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(index, value) of a copied field of each document in `wanted` that has it, a shard at a time."""
    mark = f"{json.dumps(column)}:"
    for _, shard, first, end in corpus.spans():
        here = wanted[first:end]
        if not here.any():
            continue
        held = parquet.read_table(shard, columns=["metadata"]).column(0).to_pylist()
        for place in np.flatnonzero(here):
            if held[place] and mark in held[place]:
                value = json.loads(held[place]).get(column)
                if value is not None:
                    yield first + int(place), value


def seconds(value: Any) -> float:
    """Seconds since 1970 (UTC) of a date: ISO 8601 (also a year or a month alone), RFC 2822, or a number of seconds; NaN for others."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return float("nan")
    if isinstance(value, int | float):
        return float(value)
    text = value.strip()
    for padded in (text, f"{text}-01", f"{text}-01-01"):
        try:
            if padded == text and text.isdigit() and len(text) != 8:
                continue
            read = datetime.fromisoformat(padded)
        except ValueError:
            continue
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    try:
        read = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return float("nan")
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
