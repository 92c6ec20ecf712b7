"""Joining: documents that meet in some table of numbers become groups, by tasks of bounded memory, a table or a part of it each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hone.base.spec import fingerprint
from hone.data.dedup import shards, union_find
from hone.data.dedup.meeting import by_first_bits, join_equal
from hone.data.executors.task import Function, Task, finished

SORT_KEYS = 1 << 23
"""Numbers that a task compares at once: 28 bytes each, 235 MB. A table of more is compared in ranges of its numbers."""
TASK_KEYS = 1 << 22
"""Tables of few numbers share a task of about so many, a tenth of a second: less is not worth a task."""


class Source(Protocol):
    """Where numbers come from: rows of them in pieces (a shard each). What a task is given, so small and picklable."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many numbers a row has in each piece."""
        ...

    def content(self) -> list[Any]:
        """What tells each piece from any other (JSON), the same whenever it was written."""
        ...

    def part(self, begin: int, end: int) -> Source:
        """The pieces from `begin` to `end` alone."""
        ...

    def read(self, begin: int, end: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
        """The documents (`kind` [n]) of all pieces, and their rows `begin`..`end` of numbers (uint64 [end - begin, n])."""
        ...


class Equal(NamedTuple):
    """Documents meet whose numbers of a row are equal; each row is a table."""

    num_tables: int

    def row(self, table: int) -> int:
        """The row of numbers that a table is made of."""
        return table

    def heads(self, numbers: np.ndarray, table: int) -> np.ndarray:
        """What ranges are cut by (uint64 [n], spread over all values): those that meet have the same."""
        return numbers

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None:
        """Joins in `parents` [n] the places of those that meet."""
        join_equal(parents, numbers)


class Rule(Protocol):
    """Which documents meet; methods as in `Equal`."""

    @property
    def num_tables(self) -> int: ...

    def row(self, table: int) -> int: ...

    def heads(self, numbers: np.ndarray, table: int) -> np.ndarray: ...

    def join(self, parents: np.ndarray, numbers: np.ndarray, table: int) -> None: ...


class Joining:
    """The tasks that compare all numbers of `source`, each of which leaves pairs of documents, and the groups that follow.

    Up to SORT_KEYS numbers a row, a task compares whole tables. Of more, each table is first dealt into ranges: a task a table
    and SORT_KEYS numbers of consecutive shards writes them in the order of their ranges, and a task a table and range then takes
    its slice of each such file. That moves 40 bytes a number through the disk (16 read, 12 written, 12 read again) however
    many ranges there are. Without it every range would read the whole table, 16 bytes a number and range, which is more from
    three ranges on; and slices of the shards' own files would be of a few kilobytes, millions of them for a terabyte.

    What the tasks write is named after the task, and taken over only while the numbers are those it was made of.
    """

    def __init__(self, source: Source, rule: Rule, state: Path, num_documents: int) -> None:
        self._state, self._num_documents = state, num_documents
        kind = union_find.kind_of(num_documents)
        content = source.content()
        self._spread: list[Task] = []
        self._join: list[Task] = []
        total = sum(source.sizes)
        identity = [repr(rule), fingerprint(content), kind.__name__]
        if total <= SORT_KEYS:
            for begin, end in _shared(rule.num_tables, total):
                name, given = f"join-{begin:03d}", (source, rule, begin, end, kind)
                self._join.append(Task(name, state, (f"{name}.npy", *given), [*identity, begin, end]))
            return
        bits = (-(-total // SORT_KEYS) - 1).bit_length()
        groups = list(_groups(source.sizes))
        for table in range(rule.num_tables):
            files = []
            for number, (begin, end) in enumerate(groups):
                name = f"spread-{table:03d}-{number:05d}"
                files.append(state / f"{name}.bin")
                given = (files[-1].name, source.part(begin, end), rule, table, bits, kind)
                told = [repr(rule), fingerprint(content[begin:end]), kind.__name__, table, bits]
                self._spread.append(Task(name, state, given, told))
            for part in range(1 << bits):
                name = f"join-{table:03d}-{part:05d}"
                given = (f"{name}.npy", tuple(files), rule, table, part, bits, kind)
                self._join.append(Task(name, state, given, [*identity, table, part, bits]))

    def rounds(self) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round; those of the second read what those of the first have written."""
        join = join_range if self._spread else join_tables
        if not all(finished(join, task) is not None for task in self._join):
            if self._spread:
                yield spread, self._spread
            yield join, self._join
        for task in self._spread:  # read by none any more; the manifest first: it promises the file
            task.manifest.unlink(missing_ok=True)
            (self._state / task.arguments[0]).unlink(missing_ok=True)

    def groups(self) -> np.ndarray:
        """For each document (int [num_documents]) the least one of its group, once all tasks are done."""
        parents = union_find.singles(self._num_documents)
        for task in self._join:
            pairs = np.load(self._state / task.arguments[0])
            union_find.join(parents, pairs[0], pairs[1])
        union_find.flatten(parents)
        return parents


def join_tables(
    folder: Path, name: str, source: Source, rule: Rule, begin: int, end: int, kind: type
) -> dict[str, Any]:
    """Compares the tables `begin`..`end`; what more than one of them joins is told once."""
    rows = [rule.row(table) for table in range(begin, end)]
    owners, numbers = source.read(min(rows), max(rows) + 1, kind)
    parents = union_find.singles(len(owners))
    for table, row in zip(range(begin, end), rows):
        rule.join(parents, numbers[row - min(rows)], table)
    return _save(folder / name, parents, owners)


def spread(folder: Path, name: str, source: Source, rule: Rule, table: int, bits: int, kind: type) -> dict[str, Any]:
    """Writes a table's numbers of some pieces in the order of their 2^bits ranges: where each begins, numbers, documents."""
    row = rule.row(table)
    owners, numbers = source.read(row, row + 1, kind)
    ordered = by_first_bits(rule.heads(numbers[0], table), numbers[0], owners, bits)
    with open(folder / name, "wb") as file:
        for array in ordered:
            array.tofile(file)
    return {"rows": len(owners)}


def join_range(
    folder: Path, name: str, files: Sequence[Path], rule: Rule, table: int, part: int, bits: int, kind: type
) -> dict[str, Any]:
    """Compares one range of a table's numbers, out of what `spread` has written."""
    borders = [np.fromfile(file, np.int64, (1 << bits) + 1) for file in files]
    sizes = [int(border[part + 1] - border[part]) for border in borders]
    numbers, owners = np.empty(sum(sizes), np.uint64), np.empty(sum(sizes), kind)
    done = 0
    for path, border, size in zip(files, borders, sizes):
        begin, total = int(border[part]), int(border[-1])
        with open(path, "rb") as file:
            file.seek(border.nbytes + 8 * begin)
            numbers[done : done + size] = np.fromfile(file, np.uint64, size)
            file.seek(border.nbytes + 8 * total + owners.itemsize * begin)
            owners[done : done + size] = np.fromfile(file, kind, size)
        done += size
    parents = union_find.singles(len(owners))
    rule.join(parents, numbers, table)
    return _save(folder / name, parents, owners)


def _save(path: Path, parents: np.ndarray, owners: np.ndarray) -> dict[str, Any]:
    """Writes each document that is not alone with the first of its group ([2, m]): one pair less than a group has members."""
    union_find.flatten(parents)
    joined = np.flatnonzero(parents != np.arange(len(parents), dtype=parents.dtype))
    np.save(path, np.stack([owners[joined], owners[parents[joined]]]))
    return {"rows": len(joined)}


def _shared(num_tables: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of tables of `size` numbers that make a task each, as equal as can be."""
    most = max(TASK_KEYS // max(size, 1), 1)
    num_tasks = -(-num_tables // most)
    for number in range(num_tasks):
        yield number * num_tables // num_tasks, (number + 1) * num_tables // num_tasks


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of pieces of at most SORT_KEYS numbers together, or of one larger piece."""
    begin = held = 0
    for number, size in enumerate(sizes):
        if held and held + size > SORT_KEYS:
            yield begin, number
            begin, held = number, 0
        held += size
    if begin < len(sizes):
        yield begin, len(sizes)


class Numbers(NamedTuple):
    """Files of `shards.sign_shards`, each with the indices of its documents and `width` rows of numbers."""

    files: tuple[Path, ...]
    width: int

    @property
    def sizes(self) -> list[int]:
        return [shards.length(file, 1 + self.width) for file in self.files]

    def content(self) -> list[Any]:
        return shards.contents(self.files)

    def part(self, begin: int, end: int) -> Numbers:
        return Numbers(self.files[begin:end], self.width)

    def read(self, begin: int, end: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
        return shards.gather(self.files, 1 + self.width, 1 + begin, 1 + end, kind)
