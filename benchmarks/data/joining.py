"""Joining documents by the keys of their bands: cost in the tasks and in the calling process, against sorting the keys.

    python -m benchmarks.data joining --data FOLDER

The keys are made up (a fifth of the documents are copies of others, half of them in every band, half in .4 of the bands), as is
everything here: FOLDER is not read. Times are process CPU seconds of one thread.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.clock import best_of
from hone.data.dedup.joining import Joining
from hone.data.dedup.keys import Numbers
from hone.data.executors.task import perform
from hone.text.dedup import union_find
from hone.text.dedup.tables import Equal
from hone.text.dedup.union_find import join_equal, lowest_ids

_BANDS = 14
_SHARD = 19_500
"""Documents of 64 MB of text."""


def write_keys(folder: Path, num_documents: int) -> tuple[Path, ...]:
    """Files of keys as `hone data` writes them, one of each _SHARD documents."""
    draw = np.random.default_rng(1)
    borders = [*range(0, num_documents, _SHARD), num_documents]
    files = tuple(folder / f"keys-{number:05d}.u64" for number in range(len(borders) - 1))
    like = np.arange(num_documents)
    copies = draw.choice(num_documents, num_documents // 5, replace=False)
    like[copies] = draw.integers(0, num_documents, len(copies))
    whole, copied = np.zeros(num_documents, bool), np.zeros(num_documents, bool)
    whole[copies[::2]], copied[copies] = True, True
    for band in range(-1, _BANDS):
        if band < 0:
            row = np.arange(num_documents, dtype=np.uint64)
        else:
            own = draw.integers(0, 1 << 64, num_documents, np.uint64)
            row = np.where(whole | copied & (draw.random(num_documents) < 0.4), own[like], own)
        for file, begin, end in zip(files, borders, borders[1:]):
            with open(file, "ab") as out:
                row[begin:end].tofile(out)
    return files


def measured(num_documents: int) -> list[dict[str, Any]]:
    """Rows of joining `num_documents`, after a small run that compiles."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_keys(folder, num_documents)
        joining = Joining(Numbers(files, _BANDS), Equal(_BANDS), folder, num_documents)
        tasks: Counter[str] = Counter()
        seconds = 0.0
        for function, round_ in joining.rounds():
            begun = time.process_time()
            for task in round_:
                perform(function, task)
            seconds += time.process_time() - begun
            tasks[function.__name__] = len(round_)
        ids = np.random.default_rng(2).permutation(num_documents).astype(np.uint64)
        calling, _ = best_of(3, lambda: lowest_ids(joining.groups(), ids))
        tracemalloc.start()
        lowest_ids(joining.groups(), ids)
        memory = tracemalloc.get_traced_memory()[1] / num_documents
        tracemalloc.stop()
    what = f"joining {num_documents / 1e6:g} M documents x {_BANDS} bands"
    note = ", ".join(f"{count} {function}" for function, count in tasks.items())
    return [
        {"figure": f"{what}: all tasks", "value": seconds, "unit": "s", "n": 1, "note": note},
        {"figure": f"{what}: calling process", "value": calling, "unit": "s", "n": 3},
        {"figure": f"{what}: calling process, memory", "value": memory, "unit": "B a document", "n": 1},
    ]


def against_sorting(num_keys: int = 3_000_000) -> dict[str, Any]:
    """Finding the equal ones among keys, of which a fifth are copies, by buckets and by sorting."""
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 1 << 64, num_keys, np.uint64)
    copies = draw.choice(num_keys, num_keys // 5)
    keys[copies] = keys[draw.integers(0, num_keys, len(copies))]

    def by_sorting() -> None:
        parents = union_find.singles(num_keys)
        order = np.argsort(keys)
        same = keys[order][1:] == keys[order][:-1]
        union_find.join(parents, order[:-1][same], order[1:][same])

    def by_buckets() -> None:
        join_equal(union_find.singles(num_keys), keys)

    join_equal(union_find.singles(9), keys[:9])
    ours, theirs = (best_of(4, call)[0] / num_keys * 1e9 for call in (by_buckets, by_sorting))
    row = {"figure": f"equal keys among {num_keys / 1e6:g} M joined", "value": ours, "unit": "ns a key", "n": 4}
    return {**row, "peer": "numpy argsort", "peer_value": theirs, "ratio": theirs / ours}


def rows(data: Path, peers: str | None) -> list[dict[str, Any]]:
    """The rows of this benchmark: bands that fit one task, and bands that are divided into ranges first."""
    measured(10_000)
    return [against_sorting(), *measured(3_000_000), *measured(12_000_000)]
