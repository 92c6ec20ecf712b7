"""Workers that die: their task is tried again, and a document that kills them is found and set aside alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import ArtifactError, MachineError, SpecError
from hone.data import EXECUTORS, IDENTIFIERS, annotate
from hone.data.annotate import Care
from hone.data.executors import task as task_module
from hone.data.executors.task import Task, finished, need_known, perform
from hone.data.reading import Models, careful, read, read_task
from hone.feed.files.listing import list_source
from hone.readers import parts as parts_module
from hone.readers.documents import Options
from hone.readers.pages import Extractor
from hone.text.batch import Texts

IDENTIFIER = IDENTIFIERS.read("hone")

ALL = [{"kind": "serial"}, {"kind": "processes", "workers": 2}, {"kind": "ray", "workers": 2, "address": "local"}]
OTHERS = ALL[1:]


def opened(executor: dict):
    if executor["kind"] == "ray":
        pytest.importorskip("ray")
    return EXECUTORS.read(executor).open()


def square(folder: Path, number: int) -> dict:
    (folder / f"{number}.txt").write_text(str(number * number))
    return {"rows": number}


def refuse(folder: Path, number: int) -> dict:
    (folder / f"{number}.txt").write_text("half of it")
    raise SpecError(f"number {number} is not wanted", fix="take another")


def os_pid(folder: Path, number: int) -> dict:
    return {"rows": number, "pid": os.getpid()}


class Unsendable(dict):
    """JSON can say it, pickle cannot."""

    def __reduce__(self):
        raise TypeError("pickle cannot say this")


def unsendable(folder: Path, number: int) -> dict:
    return Unsendable(rows=number)


def die(folder: Path, number: int, notes: Path, times: int) -> dict:
    """Kills its worker the first `times` times."""
    note = notes / str(number)
    before = len(note.read_text()) if note.exists() else 0
    if before < times:
        note.write_text("x" * (before + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return square(folder, number)


class DeadlyExtractor(Extractor):
    """An extractor whose library crashes on some pages."""

    def extract(self, page: str) -> str:
        if "deadly" in page:
            os.kill(os.getpid(), signal.SIGSEGV)
        return page


class Deadly:
    """A scorer whose library crashes on some text."""

    def open(self, folder: Path) -> Deadly:
        return self

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        if any("deadly" in text for text in texts.strings()):
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"score": np.full(texts.num_texts, 0.5)}


def tasks(folder: Path, count: int, **more) -> list[Task]:
    folder.mkdir(exist_ok=True)
    return [Task(f"task-{number}", folder, {"number": number, **more}, [number]) for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ALL, ids=lambda row: row["kind"])
def test_results_come_in_order_and_are_not_made_twice(tmp_path, executor):
    with opened(executor) as pool:
        made = tasks(tmp_path / "a", 9)
        assert [row["rows"] for row in pool.map(square, made)] == list(range(9))
        assert [(tmp_path / "a" / f"{number}.txt").read_text() for number in (3, 8)] == ["9", "64"]
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
        assert [row["rows"] for row in pool.map(square, made)] == list(range(9))
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before
        need_known(tmp_path / "a", made)
        with pytest.raises(SpecError, match="number 0 is not wanted"):
            list(pool.map(refuse, tasks(tmp_path / "b", 3)))
        assert not list((tmp_path / "b").glob("*.txt"))


@pytest.mark.slow
@pytest.mark.parametrize("executor", OTHERS, ids=lambda row: row["kind"])
def test_a_task_is_tried_again_when_its_worker_dies_and_given_up_at_last(tmp_path, executor):
    notes = tmp_path / "notes"
    notes.mkdir()
    with opened(executor) as pool:
        made = tasks(tmp_path / "once", 4, notes=notes, times=1)
        assert [row["rows"] for row in pool.map(die, made)] == list(range(4))
        need_known(tmp_path / "once", made)
        with pytest.raises(MachineError, match="task task-0 killed its worker 2 times"):
            list(pool.map(die, [task.given(number=9, notes=notes, times=99) for task in tasks(tmp_path / "ever", 1)]))


@pytest.mark.slow
@pytest.mark.parametrize("executor", OTHERS, ids=lambda row: row["kind"])
def test_the_document_that_kills_is_set_aside_alone(tmp_path, executor):
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    texts = [f"document {number} is fine" for number in range(20)]
    texts[7] = texts[13] = "this one is deadly"
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    state = tmp_path / "state"
    state.mkdir()
    made = read_task(
        state,
        0,
        list_source(str(tmp_path / "in")).files,
        options=Options(),
        identifier=IDENTIFIER,
        scorers=(Deadly(),),
        models=Models.of(tmp_path / "models"),
    )
    with opened(executor) as pool:
        (summary,) = pool.map(read, [made], careful)
    assert summary["rows"] == 18 and summary["broken"] == {"killed_the_worker": {"documents": 2, "bytes": 36}}
    table = parquet.read_table(state / "documents-00000.parquet")
    assert table.column("text").to_pylist() == [text for text in texts if "fine" in text]
    assert table.column("score").to_pylist() == [0.5] * 18


@pytest.mark.slow
@pytest.mark.parametrize("executor", OTHERS, ids=lambda row: row["kind"])
def test_the_file_whose_reader_dies_is_set_aside_alone(tmp_path, executor):
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    for name, text in (("a", "the first is fine"), ("b", "this one is deadly"), ("c", "the last is fine")):
        (tmp_path / "in" / f"{name}.html").write_text(text)
    state = tmp_path / "state"
    state.mkdir()
    files, options = list_source(str(tmp_path / "in")).files, Options(extractor=DeadlyExtractor())
    made = read_task(state, 0, files, options=options, identifier=IDENTIFIER, models=Models.of(tmp_path / "models"))
    with opened(executor) as pool:
        (summary,) = pool.map(read, [made], careful)
    assert summary["rows"] == 2 and summary["broken"] == {"killed_the_reader": {"documents": 1, "bytes": 18}}
    assert [row["source"] for row in summary["samples"]] == ["b.html"]
    table = parquet.read_table(state / "documents-00000.parquet")
    assert table.column("text").to_pylist() == ["the first is fine", "the last is fine"]


def test_a_reader_that_dies_inside_a_part_costs_the_rest_of_that_part(tmp_path, monkeypatch):
    from pyarrow import parquet

    rows = [json.dumps({"text": f"document {number} is fine"}) + "\n" for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.setattr(parts_module, "PART_BYTES", len("".join(rows[:10])))
    groups = annotate.tasks(list_source(str(tmp_path / "rows.jsonl")).files, Options())
    assert len(groups) >= 3 and all(len(group) == 1 for group in groups)
    state = tmp_path / "state"
    state.mkdir()
    texts, broken = [], []
    for number, group in enumerate(groups):
        models = Models.of(tmp_path / "models")
        task = read_task(state, number, group, options=Options(), identifier=IDENTIFIER, models=models)
        if (
            number == 1
        ):  # as it is tried at last, when two workers have died of the third thing that the reader hands on
            care = Care(tmp_path / "note", ("read rows.jsonl#2",))
            task = task.given(care=care)
        summary = perform(read, task)
        broken.append(summary["broken"])
        texts.append(parquet.read_table(state / task.arguments["shard"]).column("text").to_pylist())
    assert broken[1] == {"killed_the_reader": {"documents": 1, "bytes": 0}} and not broken[0] and not any(broken[2:])
    assert len(texts[1]) == 2 and len(texts[0]) == 10
    kept = [text for part in texts for text in part]
    assert kept == [row for row in (json.loads(row)["text"] for row in rows) if row in kept] and len(kept) >= 20


@pytest.mark.slow
def test_no_worker_dies_of_an_answer(tmp_path):
    """A broken row is told of by the worker that found it, and what cannot be sent is an error, not a death."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one that is fine"}\n{broken\n')
    state = tmp_path / "state"
    state.mkdir()
    files = list_source(str(tmp_path / "rows.jsonl")).files
    models = Models.of(tmp_path / "models")
    made = read_task(state, 0, files, options=Options(), identifier=IDENTIFIER, models=models)
    with opened({"kind": "processes", "workers": 1}) as pool:
        (before,) = pool.map(os_pid, tasks(tmp_path / "before", 1))
        (summary,) = pool.map(read, [made])
        assert summary["rows"] == 1 and summary["broken"]["bad_json"]["documents"] == 1
        with pytest.raises((TypeError, AttributeError, RuntimeError), match="pickle"):
            list(pool.map(unsendable, tasks(tmp_path / "unsendable", 1)))
        (after,) = pool.map(os_pid, tasks(tmp_path / "after", 1))
    assert before["pid"] == after["pid"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere only getrusage tells")
def test_a_workers_memory_is_its_own_and_not_what_its_parent_held(tmp_path):
    held = np.ones(600 << 20, np.uint8)  # three times what a worker has
    with opened({"kind": "processes", "workers": 1}) as pool:
        list(pool.map(square, tasks(tmp_path / "a", 1)))
        assert 10 << 20 < pool.peak_memory_bytes < held.nbytes


def test_a_result_that_is_short_changed_or_unknown_is_an_error(tmp_path):
    (task,) = tasks(tmp_path / "state", 1)
    folder = task.folder
    assert finished(square, task) is None and perform(square, task) == finished(square, task) == {"rows": 0}
    (folder / "0.txt").write_text("")
    with pytest.raises(ArtifactError, match="has 0 bytes, its manifest lists 1"):
        finished(square, task)
    (folder / "0.txt").write_text("1")
    with pytest.raises(ArtifactError, match="not the file that its manifest describes"):
        perform(square, task)
    (folder / "0.txt").write_text("0")
    (folder / "stray.txt").write_text("?")
    with pytest.raises(ArtifactError, match=r"stray\.txt was written by no task"):
        need_known(folder, [task])
    task.manifest.write_text("{")
    with pytest.raises(ArtifactError, match="is corrupt"):
        finished(square, task)


def test_other_code_other_input_or_another_function_is_another_task(tmp_path, monkeypatch):
    (task,) = tasks(tmp_path / "state", 1)
    assert task.key(square) != task.key(refuse)
    assert task.key(square) != task._replace(identity=[1]).key(square)
    perform(square, task)
    monkeypatch.setattr(task_module, "code_version", lambda: "newer")
    assert finished(square, task) is None


def test_ray_wants_to_be_told_where(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(SpecError, match=r"no address is given\n.*address=local"), EXECUTORS.read("ray").open():
        pass
