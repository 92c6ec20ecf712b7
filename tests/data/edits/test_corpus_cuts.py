"""Edits and decontamination on a corpus on disk: shard by shard as an executor would, one after the other."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hone.data import DECONTAMINATIONS, EDITS
from hone.data.corpus import Corpus
from hone.data.executors.task import perform
from hone.data.work import rounds
from tests.data.edits.memory import Memory

MENU = "Home | About this site | Contact the editors | Imprint\n"
NOTICE = (
    "All of what stands here may be copied by anyone who names its source and changes nothing in it, says the owner."
)
QUESTION = "If a train leaves at noon and another leaves at one o'clock, which of them arrives first?"


def texts() -> list[str]:
    rows = []
    for number in range(40):
        own = " ".join(f"{chr(97 + number % 26)}{chr(97 + number // 26)}-{place}" * 2 for place in range(50))
        rows.append(f"{MENU}{own}\n{NOTICE if number % 2 else ''} {own[:90]} again{number}.")
    rows[7] += f"\n{QUESTION}"
    return rows


def on_disk(folder, rows: list[str], borders: tuple[int, ...]) -> Corpus:
    shards, done = [], 0
    for number, size in enumerate(borders):
        here = range(done, done + size)
        table = {
            "id": pa.array([f"{index * 7919 % 1009:016x}" for index in here], pa.string()),
            "text": pa.array([rows[index] for index in here], pa.large_string()),
            "kind": pa.array(["prose"] * size, pa.string()),
            "source": pa.array([f"file-{index}" for index in here], pa.string()),
            "bytes": pa.array([len(rows[index]) for index in here], pa.int64()),
        }
        shards.append(folder / f"{number}.parquet")
        parquet.write_table(pa.table(table), shards[-1], row_group_size=4)
        done += size
    return Corpus(shards)


def run(folder, rows: list[str], borders: tuple[int, ...], apart: bool) -> tuple[list[str], list[dict]]:
    """The texts that both edits leave, and the examples that are found in them."""
    folder.mkdir()
    (folder / "set.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    corpus = on_disk(folder, rows, borders)
    kept = np.ones(len(corpus), bool)
    steps = [EDITS.read("lines"), EDITS.read("substrings")]
    last = DECONTAMINATIONS.read({"kind": "ngrams", "evaluations": [str(folder / "set.jsonl")]})
    found = None
    for number, technique in enumerate([*steps, last]):
        state = folder / f"state-{number}"
        state.mkdir()
        if apart:  # the last shard first, each known by itself alone
            chosen = technique.takes_part(corpus, kept)
            for part in reversed(corpus.parts()):
                technique.prepare(Corpus.of(part), chosen, state)
        if technique is last:
            found = technique.contaminated(corpus, kept, state)
        else:
            corpus.cut(technique.cuts(corpus, kept, state))
    left = {}
    for _, shard, first, _ in corpus.spans():
        left.update(corpus.texts(shard, first, kept))
    assert np.flatnonzero(found.dropped).tolist() == [7]
    return [left[index] for index in range(len(rows))], found.examples


def test_one_edit_after_the_other_whoever_prepares_it(tmp_path):
    rows = texts()
    one, examples = run(tmp_path / "one", rows, (40,), apart=False)
    two, again = run(tmp_path / "two", rows, (11, 0, 3, 26), apart=True)
    assert one == two and examples == again and examples[0]["samples"][0]["source"] == "file-7"
    assert sum(MENU in text for text in one) == 1 and sum(NOTICE in text for text in one) == 1
    for text, before in zip(one, rows):
        assert "again" in text and text.split()[-1] == before.split()[-1]
    # Doing one after the other is what each says of the texts that the other leaves.
    memory = Memory(rows, [f"{index * 7919 % 1009:016x}" for index in range(40)])
    for number, name in enumerate(("lines", "substrings")):
        (tmp_path / name).mkdir()
        left = memory.after(EDITS.read(name).cuts(memory, np.ones(40, bool), tmp_path / name))
        memory = Memory(left, memory.columns["id"])
        assert number or any(NOTICE in text for text in left)
    assert memory.words == one


def test_texts_are_read_again_by_tasks_alone(tmp_path, monkeypatch):
    corpus, technique = on_disk(tmp_path, texts(), (11, 20, 9)), EDITS.read("substrings")
    here, tasks = tmp_path / "here", tmp_path / "tasks"
    here.mkdir()
    tasks.mkdir()
    kept = np.ones(len(corpus), bool)
    expected = technique.cuts(corpus, kept, here)
    names = []
    for function, planned in rounds(technique, corpus, kept, tasks):
        names.append((function.__name__, len(planned)))
        for task in planned:
            perform(function, task)
    assert names == [("prepare", 3), ("hash_windows", 3), ("cut_repeats", 3)]
    monkeypatch.setattr(Corpus, "batches", None)  # whoever reads a text now fails
    found = technique.cuts(corpus, kept, tasks)
    assert sum(len(one.document) for one in found) > 10
    assert all(np.array_equal(a, b) for one, other in zip(expected, found) for a, b in zip(one, other))
