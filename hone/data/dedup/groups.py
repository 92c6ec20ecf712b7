"""Groups of duplicates: documents joined by their keys, the copy of each group that stays, and the groups as columns of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from hone.base.errors import SpecError, did_you_mean
from hone.data.corpus import Corpus
from hone.data.dedup.joining import Joining
from hone.data.dedup.keys import Earlier, ids_of, shards_of, sign, sign_tasks, source_of
from hone.data.executors.task import Function, Task, perform
from hone.text.dedup.tables import Equal, Near
from hone.text.dedup.union_find import lowest_ids, singles

_LAST = np.uint64(2**64 - 1)


class Found(NamedTuple):
    """The groups of duplicates. `stands` (int [num_documents]) is the representative of each document's group, its own index when it is that.

    `earlier` maps the representative of a group that an earlier artifact has a document of to that document's id: all of
    such a group is dropped. `figures` are for stats.json.
    """

    stands: np.ndarray
    earlier: dict[int, str]
    figures: dict[str, Any] = {}  # noqa: RUF012

    def kept(self, before: np.ndarray) -> np.ndarray:
        """Which of the documents in `before` (bool [num_documents]) stay."""
        kept = before & (self.stands == np.arange(len(self.stands), dtype=self.stands.dtype))
        kept[list(self.earlier)] = False
        return kept

    def known(self) -> np.ndarray:
        """Which documents (bool [num_documents]) are in a group with a document of an earlier artifact."""
        marked = np.zeros(len(self.stands), bool)
        marked[list(self.earlier)] = True
        return marked[self.stands]


def joining(technique: Any, corpus: Corpus, kept: np.ndarray, state: Path, earlier: list[Earlier]) -> Joining:
    """The comparison of the keys of `corpus` and of `earlier`; those that are computed from texts are in `state`."""
    source = source_of(technique, corpus, kept, state, earlier)
    distance = technique.most_bits
    rule = Near.of(sum(source.sizes), distance) if distance else Equal(technique.num_keys)
    return Joining(source, rule, state, len(corpus) + sum(shard.rows for shard in earlier))


def rounds(technique: Any, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
    """(function, tasks) of each round, after `prepare`; all tasks of a round must be done before the next round."""
    earlier = shards_of(technique.against, len(corpus))
    if tasks := sign_tasks(technique, earlier, state):
        yield sign, tasks
    yield from joining(technique, corpus, kept, state, earlier).rounds()


def compare(technique: Any, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
    """The groups of the documents where `kept`, with the tasks of all rounds that are not done yet done here."""
    if hasattr(technique, "prepare"):
        technique.prepare(corpus, kept, state)
    for function, tasks in rounds(technique, corpus, kept, state):
        for task in tasks:
            perform(function, task)
    earlier = shards_of(technique.against, len(corpus))
    groups = joining(technique, corpus, kept, state, earlier).groups()
    known, groups = groups[len(corpus) :], groups[: len(corpus)]
    met: dict[int, str] = {}
    if earlier:
        numbers = np.flatnonzero(known < len(corpus))
        for group, ident in zip(known[numbers].tolist(), ids_of(earlier, numbers + len(corpus))):
            met[group] = min(met.get(group, ident), ident)
    rank = ranks(technique.keep, technique.column, technique.sources, corpus, _shared(groups, kept))
    stands = lowest_ids(groups, corpus.columns["id"], rank)
    return Found(stands, {int(stands[group]): ident for group, ident in met.items()})


def _shared(groups: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Which documents (bool [n]) are in a group of several; `groups` (int [n]) has the lowest index of each one's group."""
    several = np.zeros(len(groups), bool)
    several[groups[groups != np.arange(len(groups), dtype=groups.dtype)]] = True
    return several[groups] & kept


def ranks(keep: str, column: str, sources: tuple[str, ...], corpus: Corpus, wanted: np.ndarray) -> np.ndarray | None:
    """A rank (uint64 [num_documents]) for each document in `wanted` (bool): the copy with the lowest stays, of equal ones that
    with the lowest id. None for 'lowest_id'.

    Documents without a number or a date are last. Raises SpecError when `column` holds no numbers or no date that can be read, or
    `sources` names one that the corpus has not.
    """
    count = len(corpus)
    if keep == "lowest_id" or not wanted.any():
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


COLUMNS = ("cluster", "cluster_size")
"""The id of the copy that stays (of an earlier artifact's document, if the group was dropped for one), and how many copies were compared."""


class Named(NamedTuple):
    """The clusters of some documents: `ids` (bytes [n]) and `sizes` (int32 [n]); size 0 for a document that was not compared."""

    ids: np.ndarray
    sizes: np.ndarray

    def at(self, here: slice) -> Named:
        """Those of the documents in `here`."""
        return Named(self.ids[here], self.sizes[here])

    def added(self, table: Any, place: int, here: slice) -> Any:
        """`table` with the columns of the documents in `here`, from column `place` on; null where not compared."""
        compared = self.sizes[here] > 0
        named = pa.array(np.char.decode(self.ids[here], "ascii"), pa.string(), mask=~compared)
        counted = pa.array(self.sizes[here], pa.int32(), mask=~compared)
        return table.add_column(place, COLUMNS[0], named).add_column(place + 1, COLUMNS[1], counted)


class Clusters:
    """The groups of the documents where `compared` (bool [num_documents]), joined by one deduplication after the other."""

    def __init__(self, compared: np.ndarray) -> None:
        self._compared = compared
        self._stands = singles(len(compared))
        self._earlier: dict[int, str] = {}

    def join(self, found: Found) -> None:
        """Adds the groups of another deduplication, which compared the representatives of the groups so far."""
        self._stands = found.stands[self._stands]
        self._earlier |= found.earlier

    def named(self, ids: np.ndarray) -> Named:
        """The columns of all documents; `ids` (bytes [num_documents]) are theirs."""
        sizes = np.bincount(self._stands[self._compared], minlength=len(ids)).astype(np.int32)
        names = ids
        if self._earlier:
            width = max(ids.itemsize, *(len(ident.encode()) for ident in self._earlier.values()))
            names = ids.astype(f"S{width}")
            for index, ident in self._earlier.items():
                names[index] = ident.encode()
        return Named(names[self._stands], np.where(self._compared, sizes[self._stands], np.int32(0)))
