"""Joining by tasks against a dictionary: any split, any executor, killed anywhere, and never from other numbers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import ArtifactError
from hone.data import EXECUTORS
from hone.data.dedup import joining
from hone.data.dedup import keys as key_files
from hone.data.dedup.exact import Exact
from hone.data.dedup.joining import Joining
from hone.data.dedup.keys import Numbers
from hone.data.executors import task as task_files
from hone.data.executors.task import Task, perform
from hone.text.dedup import union_find
from hone.text.dedup.tables import Equal, Near
from tests.text.dedup import oracles

SPLITS = [(10**6, 10**6), (10**6, 400), (700, 1), (150, 1), (40, 1)]
"""SORT_KEYS and TASK_KEYS, from all in one task to ranges of a few numbers."""


def by_dictionary(rows: np.ndarray) -> list[tuple[int, int]]:
    """Edges between places with equal numbers in a row (uint64 [tables, n])."""
    edges = []
    for row in rows.tolist():
        groups = defaultdict(list)
        for place, number in enumerate(row):
            groups[number].append(place)
        edges += [pair for group in groups.values() for pair in itertools.pairwise(group)]
    return edges


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1), st.integers(0, 40).map(lambda n: n << 58))),
    st.sampled_from([np.int32, np.int64]),
)
def test_equal_numbers_are_joined_and_no_others(numbers, kind):
    parents = union_find.singles(len(numbers)).astype(kind)
    union_find.join_equal(parents, np.array(numbers, np.uint64))
    union_find.flatten(parents)
    assert parents.tolist() == oracles.components(len(numbers), by_dictionary(np.array([numbers], np.uint64)))


@pytest.mark.parametrize("spread", [1, 1 << 20, 1 << 44])
def test_equal_numbers_in_many_buckets(spread):
    draw = np.random.default_rng(spread % 1000)
    numbers = draw.integers(0, 90_000, 150_000, np.uint64) * np.uint64(
        spread
    )  # in some buckets only, in high bits only
    numbers[draw.choice(len(numbers), 30_000, replace=False)] = numbers[7]
    parents = union_find.singles(len(numbers))
    union_find.join_equal(parents, numbers)
    union_find.flatten(parents)
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    assert np.array_equal(parents, first[group])


def files_of(folder: Path, rows: np.ndarray, owners: np.ndarray, sizes: list[int]) -> tuple[Path, ...]:
    """`rows` (uint64 [tables, n]) of the documents `owners` as files of so many each."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(sizes)
    for number, (begin, end) in enumerate(zip([0, *ends], ends)):
        block = np.vstack([owners[None, begin:end].astype(np.uint64), rows[:, begin:end]])
        key_files.save(folder / f"keys-{number:05d}.u64", block)
    return tuple(folder / f"keys-{number:05d}.u64" for number in range(len(sizes)))


def done(made: Joining) -> np.ndarray:
    """The groups, all tasks done here."""
    for function, tasks in made.rounds():
        for task in tasks:
            perform(function, task)
    return made.groups()


@pytest.fixture
def keys() -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Three tables of 1,000 numbers, of which many meet; their documents among 1,200; shard sizes; the least of each group."""
    draw = np.random.default_rng(5)
    rows = draw.integers(0, 1 << 64, (3, 1000), np.uint64)
    for row in rows:
        row[draw.choice(1000, 200, replace=False)] = row[draw.integers(0, 1000, 200)]
    rows[1, 300:360] = rows[1, 0]
    owners = np.sort(draw.choice(1200, 1000, replace=False))
    edges = [(int(owners[one]), int(owners[other])) for one, other in by_dictionary(rows)]
    return rows, owners, [300, 0, 90, 410, 200], oracles.components(1200, edges)


@pytest.mark.parametrize("most, task", SPLITS)
def test_any_split_gives_the_groups_of_a_dictionary(keys, tmp_path, monkeypatch, most, task):
    monkeypatch.setattr(joining, "SORT_KEYS", most)
    monkeypatch.setattr(joining, "TASK_KEYS", task)
    rows, owners, sizes, expected = keys
    made = Joining(Numbers(files_of(tmp_path, rows, owners, sizes), 3), Equal(3), tmp_path, 1200)
    assert done(made).tolist() == expected
    left = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert left == {"keys", "join"}, "what was written for the ranges alone stays behind"


def test_a_table_is_split_as_it_needs_and_no_further(keys, tmp_path, monkeypatch):
    rows, owners, sizes, _ = keys
    source = Numbers(files_of(tmp_path, rows, owners, sizes), 3)
    found = []
    for most, task in SPLITS:
        monkeypatch.setattr(joining, "SORT_KEYS", most)
        monkeypatch.setattr(joining, "TASK_KEYS", task)
        planned = Joining(source, Equal(3), tmp_path, 1200).rounds()
        found.append([len(tasks) for _, tasks in planned])
    assert found == [[1], [3], [3 * 2, 3 * 2], [3 * 4, 3 * 8], [3 * 4, 3 * 32]]
    monkeypatch.setattr(joining, "SORT_KEYS", 10**6)
    monkeypatch.setattr(joining, "TASK_KEYS", 8000)
    planned = [task.arguments for _, tasks in Joining(source, Equal(14), tmp_path, 1200).rounds() for task in tasks]
    spans = [(given["begin"], given["end"]) for given in planned]
    assert spans == [(0, 7), (7, 14)], "fourteen tables of which eight fit a task are two tasks of seven"


@pytest.mark.parametrize("most", [10**6, 100, 9])
@pytest.mark.parametrize("distance", [0, 1, 3])
def test_near_numbers_meet_in_ranges_too(tmp_path, monkeypatch, most, distance):
    monkeypatch.setattr(joining, "SORT_KEYS", most)
    draw = np.random.default_rng(distance)
    values = draw.integers(0, 1 << 64, 80, np.uint64)
    for _ in range(160):
        flips = sum(1 << int(bit) for bit in draw.choice(64, draw.integers(0, 6), replace=False))
        values = np.append(values, draw.choice(values) ^ np.uint64(flips))
    values = np.append(values, values[:1].repeat(30))
    near = [
        pair
        for pair in itertools.combinations(range(len(values)), 2)
        if int(values[pair[0]] ^ values[pair[1]]).bit_count() <= distance
    ]
    sizes = [len(values) // 3] * 2 + [len(values) - 2 * (len(values) // 3)]
    source = Numbers(files_of(tmp_path, values[None], np.arange(len(values)), sizes), 1)
    made = Joining(source, Near.of(len(values), distance), tmp_path, len(values))
    assert done(made).tolist() == oracles.components(len(values), near)


@pytest.mark.parametrize("most", [10**6, 30])
def test_hashes_are_read_from_the_shards_by_the_tasks(tmp_path, monkeypatch, most):
    monkeypatch.setattr(joining, "SORT_KEYS", most)
    draw = np.random.default_rng(1)
    texts = [f"text {number}" for number in draw.integers(0, 60, 200)]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    corpus = oracles.corpus_of(tmp_path / "in", texts, ids, 7)
    kept = draw.random(200) < 0.8
    (tmp_path / "state").mkdir()
    stands = Exact().compare(corpus, kept, tmp_path / "state").stands
    for index, text in enumerate(texts):
        group = [other for other in range(200) if kept[other] and texts[other] == text]
        assert stands[index] == (min(group, key=lambda other: ids[other]) if kept[index] else index)
    assert "text_hash" not in corpus.columns._read


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("join-")}


@pytest.mark.slow
@pytest.mark.parametrize("most", [10**6, 150])
def test_workers_write_what_one_process_writes(keys, tmp_path, monkeypatch, most):
    monkeypatch.setattr(joining, "SORT_KEYS", most)
    rows, owners, sizes, expected = keys
    found = []
    for number, executor in enumerate(({"kind": "serial"}, {"kind": "processes", "workers": 3})):
        folder = tmp_path / str(number)
        made = Joining(Numbers(files_of(folder, rows, owners, sizes), 3), Equal(3), folder, 1200)
        with EXECUTORS.read(executor).open() as pool:
            for function, tasks in made.rounds():
                assert len(list(pool.map(function, tasks))) == len(tasks)
        assert made.groups().tolist() == expected
        found.append(bytes_of(folder))
    assert found[0] == found[1] and found[0]


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from hone.data.dedup import joining
    from hone.data.dedup.keys import Numbers
    from hone.data.executors.task import perform
    from hone.text.dedup.tables import Equal

    folder, moment = Path(sys.argv[1]), int(sys.argv[2])
    joining.SORT_KEYS = 150
    files = tuple(sorted(folder.glob("keys-*.u64")))
    made = joining.Joining(Numbers(files, 3), Equal(3), folder, 1200)
    unlink, save, begun = Path.unlink, joining._save, 0

    def counted(function):
        def call(*args, **kwargs):
            global begun
            begun += 1
            if begun == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    joining._save, Path.unlink = counted(save), counted(unlink)  # inside of a task, and while clearing up
    joining.by_first_bits = counted(joining.by_first_bits)
    for function, tasks in made.rounds():
        for task in tasks:
            perform(function, task)
""")


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_groups(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "SORT_KEYS", 150)
    rows, owners, sizes, expected = keys
    whole = tmp_path / "whole"
    done(Joining(Numbers(files_of(whole, rows, owners, sizes), 3), Equal(3), whole, 1200))
    # 12 tasks that write ranges, 24 that join, 24 files to remove.
    for moment in (5, 13, 20, 40):
        folder = tmp_path / str(moment)
        files = files_of(folder, rows, owners, sizes)
        process = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(moment)], capture_output=True)
        assert process.returncode == -signal.SIGKILL, process.stderr.decode()
        before = {path: path.stat().st_mtime_ns for path in folder.glob("join-*")}
        made = Joining(Numbers(files, 3), Equal(3), folder, 1200)
        assert done(made).tolist() == expected and bytes_of(folder) == bytes_of(whole)
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "done work was done again"


@pytest.mark.parametrize("most", [10**6, 150])
def test_other_numbers_of_the_same_size_and_time_are_compared_again(keys, tmp_path, monkeypatch, most):
    monkeypatch.setattr(joining, "SORT_KEYS", most)
    rows, owners, sizes, expected = keys
    files = files_of(tmp_path, rows, owners, sizes)
    made = Joining(Numbers(files, 3), Equal(3), tmp_path, 1200)
    assert done(made).tolist() == expected
    stamp = files[3].stat()
    rows[:, 400:500] = rows[:, :1]
    files_of(tmp_path, rows, owners, sizes)
    os.utime(files[3], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    again = Joining(Numbers(files, 3), Equal(3), tmp_path, 1200)
    edges = [(int(owners[one]), int(owners[other])) for one, other in by_dictionary(rows)]
    assert done(again).tolist() == oracles.components(1200, edges) != expected


def test_a_manifest_says_what_a_file_holds_without_reading_it(tmp_path):
    path = tmp_path / "keys-00000.u64"
    task = Task("shard-00000", tmp_path, {"name": path.name, "raw": b"some numbers"}, 1)
    perform(_write, task)
    [told] = task_files.contents([path])
    task.manifest.unlink()
    assert task_files.contents([path]) == [told] and told[:2] == ["keys-00000.u64", 12]


def _write(folder: Path, name: str, raw: bytes) -> dict:
    (folder / name).write_bytes(raw)
    return {}


def test_a_damaged_result_is_an_error(keys, tmp_path):
    rows, owners, sizes, _ = keys
    made = Joining(Numbers(files_of(tmp_path, rows, owners, sizes), 3), Equal(3), tmp_path, 1200)
    done(made)
    path = tmp_path / "join-000.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=r"join-000\.npy has"):
        list(made.rounds())
