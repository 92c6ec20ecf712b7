"""Joining: groups documents that share a key in some table, by tasks of bounded memory, each for tables or a range of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.spec import fingerprint
from hone.data.dedup.keys import KeySource
from hone.data.executors.task import Function, Task, finished
from hone.text.dedup import union_find
from hone.text.dedup.tables import Rule
from hone.text.dedup.union_find import by_first_bits

SORT_KEYS = 1 << 23
"""Keys that a task compares at once: 28 bytes each, 235 MB. A larger table is compared in ranges of its keys."""
TASK_KEYS = 1 << 22
"""Small tables share a task of about so many keys, a tenth of a second of work; smaller tasks are not worth their overhead."""


class Joining:
    """The tasks that compare all keys of `source`, each of which writes pairs of documents, and the resulting groups.

    Up to SORT_KEYS keys in a row, a task compares whole tables. A larger table is first split into ranges: a task per table
    and SORT_KEYS keys of consecutive shards writes them in the order of their ranges, and a task per table and range then reads
    its slice of each such file. That moves 40 bytes per key through the disk (16 read, 12 written, 12 read again), however
    many ranges there are. Without it, every range would read the whole table, 16 bytes per key and range, which is more from
    three ranges on, and slices of the shards' own files would have a few kilobytes, millions of them for a terabyte.

    Files are named after their task, and reused only while the keys are those they were computed from.
    """

    def __init__(self, source: KeySource, rule: Rule, state: Path, num_documents: int) -> None:
        self._state, self._num_documents = state, num_documents
        kind = union_find.kind_of(num_documents)
        content = source.content()
        self._partition: list[Task] = []
        self._join: list[Task] = []
        total = sum(source.sizes)
        identity = [repr(rule), fingerprint(content), kind.__name__]
        if total <= SORT_KEYS:
            for begin, end in _shared(rule.num_tables, total):
                name, span = f"join-{begin:03d}", {"begin": begin, "end": end}
                given = {"name": f"{name}.npy", "source": source, "rule": rule, **span, "kind": kind}
                self._join.append(Task(name, state, given, [*identity, begin, end]))
            return
        bits = (-(-total // SORT_KEYS) - 1).bit_length()
        groups = list(_groups(source.sizes))
        for table in range(rule.num_tables):
            files = []
            for number, (begin, end) in enumerate(groups):
                name = f"partition-{table:03d}-{number:05d}"
                files.append(state / f"{name}.bin")
                given = {"name": files[-1].name, "source": source.part(begin, end), "rule": rule, "table": table}
                told = [repr(rule), fingerprint(content[begin:end]), kind.__name__, table, bits]
                self._partition.append(Task(name, state, {**given, "bits": bits, "kind": kind}, told))
            for part in range(1 << bits):
                name = f"join-{table:03d}-{part:05d}"
                given = {"name": f"{name}.npy", "files": tuple(files), "rule": rule, "table": table, "part": part}
                told = [*identity, table, part, bits]
                self._join.append(Task(name, state, {**given, "bits": bits, "kind": kind}, told))

    def rounds(self) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round; tasks of the second round read what those of the first have written."""
        join = join_range if self._partition else join_tables
        if not all(finished(join, task) is not None for task in self._join):
            if self._partition:
                yield partition, self._partition
            yield join, self._join
        for task in self._partition:  # no longer read; the manifest is removed first, because it lists the file
            task.manifest.unlink(missing_ok=True)
            (self._state / task.arguments["name"]).unlink(missing_ok=True)

    def groups(self) -> np.ndarray:
        """For each document (int [num_documents]) the lowest index of its group, once all tasks are done."""
        parents = union_find.singles(self._num_documents)
        for task in self._join:
            pairs = np.load(self._state / task.arguments["name"])
            union_find.join(parents, pairs[0], pairs[1])
        union_find.flatten(parents)
        return parents


def join_tables(
    folder: Path, name: str, source: KeySource, rule: Rule, begin: int, end: int, kind: type
) -> dict[str, Any]:
    """Compares the tables `begin`..`end`; a pair that several of them join is written once."""
    rows = [rule.row(table) for table in range(begin, end)]
    owners, numbers = source.read(min(rows), max(rows) + 1, kind)
    parents = union_find.singles(len(owners))
    for table, row in zip(range(begin, end), rows):
        rule.join(parents, numbers[row - min(rows)], table)
    return _save(folder / name, parents, owners)


def partition(
    folder: Path, name: str, source: KeySource, rule: Rule, table: int, bits: int, kind: type
) -> dict[str, Any]:
    """Writes the keys of a table, for some pieces, sorted by their 2^bits ranges: where each range begins, keys, documents."""
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
    """Compares one range of a table's keys, from the files that `partition` has written."""
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
    """Writes the pairs (document, first of its group) of all groups of two or more, [2, m]."""
    union_find.flatten(parents)
    joined = np.flatnonzero(parents != np.arange(len(parents), dtype=parents.dtype))
    np.save(path, np.stack([owners[joined], owners[parents[joined]]]))
    return {"rows": len(joined)}


def _shared(num_tables: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of tables of `size` keys, a task each, as equal as possible."""
    most = max(TASK_KEYS // max(size, 1), 1)
    num_tasks = -(-num_tables // most)
    for number in range(num_tasks):
        yield number * num_tables // num_tasks, (number + 1) * num_tables // num_tasks


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of pieces with at most SORT_KEYS keys together, or of one larger piece."""
    begin = held = 0
    for number, size in enumerate(sizes):
        if held and held + size > SORT_KEYS:
            yield begin, number
            begin, held = number, 0
        held += size
    if begin < len(sizes):
        yield begin, len(sizes)
