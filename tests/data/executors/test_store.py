"""Results kept in a store: machines that share no disk write the same bytes, and a stage goes on where another machine was lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, MachineError, MissingExtra, SpecError
from hone.base.run import Run
from hone.base.store import Store, unreachable
from hone.data import EXECUTORS, IDENTIFIERS, annotate
from hone.data.dedup import joining
from hone.data.executors import processes
from hone.data.executors import task as task_module
from hone.data.executors.keeping import Keeping
from hone.data.executors.serial import Serial
from hone.data.executors.task import Task, finished, need_known, perform
from hone.data.reading import Models, careful, read, read_task
from hone.data.stage import Data
from hone.feed.files.listing import list_source
from hone.readers.documents import Options
from tests.data.executors.test_deaths import Deadly, square, tasks
from tests.data.stories import story
from tests.forking import forking

IDENTIFIER = IDENTIFIERS.read("hone")

pytest.importorskip("fsspec")
NOTICE = "This notice stands below all of them, it says nothing, and it is longer than a hundred bytes so that both edits see it."


def total(folder: Path, shards: tuple[Path, ...], words: dict[str, Path]) -> dict:
    """A task that reads what others wrote."""
    sum_ = sum(int(path.read_text()) for path in shards)
    (folder / "total.txt").write_text(f"{words['unit'].read_text()} {sum_}")
    return {"rows": len(shards)}


def noting(folder: Path, notes: Path) -> dict:
    """A task that can be counted."""
    (notes / f"{len(list(notes.iterdir()))}").touch()
    (folder / "made.txt").write_text("made")
    return {"rows": 1}


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def apart(tmp_path, monkeypatch) -> Path:
    """Every worker of the processes executor lives on a machine of its own, as far as it can see: relative paths lead elsewhere.

    Returns the folder of the machines; this process is in another.
    """
    machines, numbers, plain = tmp_path / "machines", itertools.count(), subprocess.Popen

    class Elsewhere(plain):
        def __init__(self, command, **more):
            if "executors.processes import work" in command[-1]:
                more["cwd"] = machines / f"{next(numbers)}"
                more["cwd"].mkdir(parents=True)
            super().__init__(command, **more)

    monkeypatch.setattr(processes.subprocess, "Popen", Elsewhere)
    (tmp_path / "driver").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    return machines


@pytest.mark.slow
def test_workers_apart_find_what_they_read_and_hand_on_what_they_write(tmp_path, apart):
    state = Path("state")
    made = tasks(state, 4)
    (state / "unit.txt").write_text("apples")  # as a tokenizer: written by no task
    given = {"shards": tuple(state / f"{n}.txt" for n in range(4)), "words": {"unit": state / "unit.txt"}}
    last = Task("total", state, given, ["t"])
    with EXECUTORS.read({"kind": "processes", "workers": 2}).open() as pool:
        with pytest.raises(FileNotFoundError):  # they really see nothing of one another
            list(pool.map(square, made))
            list(pool.map(total, [last]))
        keeping = Keeping(pool, f"file://{tmp_path}/bucket", Path("state"))
        assert [row["rows"] for row in keeping.map(square, made)] == list(range(4))
        assert not (apart / "0" / "state" / "total.txt").exists()
        assert [row["rows"] for row in keeping.map(total, [last])] == [4]
    assert (state / "total.txt").read_text() == "apples 14"
    (state / "unit.txt").unlink()
    need_known(state, [*made, last])


def test_workers_with_other_code_are_said(tmp_path, apart, monkeypatch):
    monkeypatch.setattr(task_module, "code_version", lambda: "newer")
    with EXECUTORS.read({"kind": "processes", "workers": 1}).open() as pool:
        keeping = Keeping(pool, f"file://{tmp_path}/bucket", Path("state"))
        with pytest.raises(MachineError, match="no result of this version of the code"):
            list(keeping.map(square, tasks(Path("state"), 1)))


def test_a_store_may_be_a_folder(tmp_path, apart):
    with EXECUTORS.read({"kind": "processes", "workers": 1}).open() as pool:
        assert list(Keeping(pool, f"{tmp_path}/shared", Path("state")).map(square, tasks(Path("state"), 2)))
    assert len(list((tmp_path / "shared" / "files").iterdir())) == 2 and Path("state/1.txt").read_text() == "1"


@pytest.mark.parametrize("moment", range(3))
def test_a_task_is_done_where_its_manifest_is_and_not_before(tmp_path, monkeypatch, moment):
    """Killed before anything that it puts, it is done again on the next machine; afterwards it is not."""
    state, url = tmp_path / "state", f"memory://kept/{tmp_path.name}"
    notes = tmp_path / "notes"
    notes.mkdir()
    task = Task("task-0", state, {"notes": notes}, [0])
    done: list[str] = []

    def dying(plain):
        def put(self, content, name):
            if len(done) == moment:
                raise Killed
            done.append(name)
            plain(self, content, name)

        return put

    def once() -> dict:
        with Serial().open() as pool:
            (summary,) = Keeping(pool, url, state).map(noting, [task])
        return summary

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", dying(Store.put))
        patch.setattr(Store, "write", dying(Store.write))
        if moment < 2:
            with pytest.raises(Killed):
                once()
        else:
            once()
    shutil.rmtree(state)  # the machine is lost
    assert once() == {"rows": 1} and (state / "made.txt").read_text() == "made"
    assert len(list(notes.iterdir())) == (2 if moment < 2 else 1)
    need_known(state, [task])


def test_what_was_done_before_there_was_a_store_is_put_there(tmp_path):
    state, notes = tmp_path / "state", tmp_path / "notes"
    notes.mkdir()
    task = Task("task-0", state, {"notes": notes}, [0])
    perform(noting, task)
    with Serial().open() as pool:
        keeping = Keeping(pool, f"file://{tmp_path}/bucket", state)
        assert list(keeping.map(noting, [task])) == [{"rows": 1}]
        shutil.rmtree(state)
        assert list(keeping.map(noting, [task])) == [{"rows": 1}]
    assert len(list(notes.iterdir())) == 1 and (state / "made.txt").read_text() == "made"
    assert finished(noting, task) == {"rows": 1}


def test_other_code_and_other_things_read_are_other_results(tmp_path, monkeypatch):
    state, url = tmp_path / "state", f"file://{tmp_path}/bucket"
    state.mkdir()
    for name, text in (("0.txt", "1"), ("unit.txt", "pears")):
        (state / name).write_text(text)
    task = Task("total", state, {"shards": (state / "0.txt",), "words": {"unit": state / "unit.txt"}}, ["same"])

    def made() -> str:
        with Serial().open() as pool:
            list(Keeping(pool, url, state).map(total, [task]))
        return (state / "total.txt").read_text()

    assert made() == "pears 1"
    (state / "0.txt").write_text("2")  # same name, same size: what the task says of its input is the same
    assert made() == "pears 2"
    (state / "0.txt").write_text("1")
    assert made() == "pears 1" and len(list((tmp_path / "bucket" / "tasks").iterdir())) == 2
    monkeypatch.setattr(task_module, "code_version", lambda: "newer")
    assert made() == "pears 1" and len(list((tmp_path / "bucket" / "tasks").iterdir())) == 3


def test_a_damaged_store_is_said(tmp_path):
    state, bucket = tmp_path / "state", tmp_path / "bucket"
    (task,) = tasks(state, 1)

    def again():
        shutil.rmtree(state, ignore_errors=True)
        with Serial().open() as pool:
            return list(Keeping(pool, f"file://{bucket}", state).map(square, [task]))

    again()
    (kept,) = (bucket / "files").iterdir()
    (manifest,) = (bucket / "tasks").iterdir()
    kept.write_text("9")
    with pytest.raises(ArtifactError, match=rf"{kept.name} \(0\.txt\) is not the file.*\n.*remove .*{manifest.name}"):
        again()
    kept.unlink()
    with pytest.raises(ArtifactError, match=rf"{kept.name} is missing \(0\.txt\)\n.*remove .*{manifest.name}"):
        again()
    manifest.write_text("{")
    with pytest.raises(ArtifactError, match="is corrupt"):
        again()
    manifest.unlink()
    assert again() == [{"rows": 0}] and kept.read_text() == "0"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Files, seeds and an evaluation set, as every machine would have them or find them at a URL."""
    home = tmp_path_factory.mktemp("everywhere")
    folder = home / "text"
    folder.mkdir()
    for number in range(4):
        rows = [f"{story(number * 1000 + i, 240)}\n{NOTICE}" for i in range(30)] + [story(5, 240), story(7, 240)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    for name, first in (("good", 50_000), ("bad", 60_000)):
        (home / name).mkdir()
        text = [
            story(first + i, 60) if name == "good" else f"{i} buy now {i * 7} click here {i * 3}" for i in range(40)
        ]
        (home / name / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in text))
    (home / "evaluation.jsonl").write_text(json.dumps({"text": story(1003, 240)}) + "\n")
    return home


def spec(source: Path) -> dict:
    """One technique of every kind that has tasks."""
    return {
        "source": str(source / "text"),
        "tokenizer": {"vocab_size": 400},
        "scorers": [{"kind": "hashed_logistic", "high": [str(source / "good")], "low": [str(source / "bad")]}],
        "filters": ["length", "gopher_quality", {"kind": "expression", "keep": "quality >= 0.0", "reason": "poor"}],
        "dedups": ["exact", "minhash", "simhash"],
        "edits": ["lines", "substrings"],
        "decontaminations": [{"kind": "ngrams", "evaluations": [str(source / "evaluation.jsonl")]}],
    }


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(annotate, "TASK_BYTES", 1000)


@pytest.fixture(scope="module")
def serial(source, tmp_path_factory) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annotate, "TASK_BYTES", 1000)
        return Data.read(spec(source)).make(tmp_path_factory.mktemp("serial") / "data-text", run=Run(quiet=True))


@pytest.mark.slow
def test_a_stage_on_machines_that_share_no_disk(serial, source, tmp_path, apart, monkeypatch):
    monkeypatch.setattr(
        joining, "SORT_KEYS", 60
    )  # so that tables are dealt into ranges, and tasks read what tasks wrote
    executor = {"kind": "processes", "workers": 2, "store": f"file://{tmp_path}/bucket"}
    made = Data.read(spec(source)).make("data-text", run=Run(quiet=True, executor=executor))
    assert made.content == serial.content
    made.verify()
    states = [machine / "data-text.partial" / "state" for machine in sorted(apart.iterdir())]
    assert len(states) == 2
    assert list((tmp_path / "bucket").glob("*/tasks/partition-*")) and list(
        (tmp_path / "bucket").glob("*/tasks/join-*")
    )
    for step in ("read", "filter", "dedup-1", "edit-0", "tokens", "documents"):  # each machine did some of each
        assert all(list((state / step).glob("*.done")) for state in states), step
    with pytest.raises(
        ArtifactError, match=r"quality\.npz is not a scorer's model.*No such file"
    ):  # they are really apart
        without = {"kind": "processes", "workers": 2}
        Data.read(spec(source)).make("data-other", run=Run(quiet=True, executor=without))


@pytest.mark.slow
def test_a_limit_ends_at_the_same_document(source, tmp_path):
    """On one machine here; without a store, test_same_bytes has it of processes."""
    given = {"source": str(source / "text"), "tokenizer": {"vocab_size": 400}, "max_bytes": 60_000}
    executor = {"kind": "serial", "store": f"file://{tmp_path}/bucket"}
    one = Data.read(given).make(tmp_path / "one", run=Run(quiet=True))
    two = Data.read(given).make(tmp_path / "two", run=Run(quiet=True, executor=executor))
    assert one.content == two.content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "moments"),
    [({"kind": "serial"}, (1, 11, 28)), ({"kind": "processes", "workers": 2}, (5, 19))],
    ids=["serial", "processes"],
)
def test_a_stage_goes_on_where_its_machine_was_lost(serial, source, tmp_path, executor, moments):
    """Killed at growing numbers of finished tasks, its disk gone each time: what was done is done, the bytes are the same."""
    bucket = tmp_path / "bucket"
    executor = {**executor, "store": f"file://{bucket}"}

    def kept() -> dict[str, int]:
        return {
            path.name: path.stat().st_mtime_ns for path in bucket.glob("*/tasks/*") if not path.name.endswith("tmp")
        }

    with forking("tests.data.killed:stage") as run_killed:
        for number, wanted in enumerate(moments):
            out = tmp_path / f"machine-{number}" / "data-text"
            before = kept()
            growth = max(wanted - len(before), 1)
            ended = run_killed(out, spec(source), executor, f"{bucket}/*/tasks/*", growth, 0.0)
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            assert before.items() <= kept().items()
            while out.parent.exists():  # workers write until they notice
                shutil.rmtree(out.parent, ignore_errors=True)
    before = kept()
    made = Data.read(spec(source)).make(tmp_path / "last" / "data-text", run=Run(quiet=True, executor=executor))
    assert made.content == serial.content and len(before) >= moments[-1] and before.items() <= kept().items()
    made.verify()


@pytest.mark.slow
def test_an_edited_input_and_a_redo_take_nothing_from_the_store(source, tmp_path):
    """Same spec, same names, same sizes: what the store holds is of the text before."""
    (tmp_path / "text").mkdir()
    shutil.copy(source / "text" / "0.jsonl", tmp_path / "text")
    path = tmp_path / "text" / "0.jsonl"
    given, bucket = {"source": str(tmp_path / "text"), "tokenizer": {"vocab_size": 400}}, tmp_path / "bucket"
    executor = {"kind": "serial", "store": f"file://{bucket}"}

    def made(name: str, **more) -> str:
        artifact = Data.read(given).make(tmp_path / name / "data-text", run=Run(quiet=True, executor=executor, **more))
        return artifact.content

    before = made("one")
    assert made("two") == before and len(list(bucket.iterdir())) == 1
    times = path.stat()
    path.write_text(path.read_text().replace("nothing", "NOTHING"))
    assert path.stat().st_size == times.st_size
    after = made("three")
    assert after != before and len(list(bucket.iterdir())) == 2
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as at a URL, where only the size is known
    assert made("four") == before
    assert made("five", redo=True) == after and made("six") == after


@pytest.mark.slow
def test_a_store_that_fails_is_said_and_the_stage_resumes(serial, source, tmp_path, monkeypatch):
    plain, puts = Store.put, []

    def failing(self, file, name):
        puts.append(name)
        if len(puts) == 7:
            raise unreachable(f"{self.url}/{name}", ConnectionError("503 slow down"))
        plain(self, file, name)

    run = Run(quiet=True, executor={"kind": "serial", "store": f"memory://failing/{tmp_path.name}"})
    monkeypatch.setattr(Store, "put", failing)
    with pytest.raises(MachineError, match="503 slow down"):
        Data.read(spec(source)).make(tmp_path / "data-text", run=run)
    assert Data.read(spec(source)).make(tmp_path / "data-text", run=run).content == serial.content


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_said_before_the_work(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for store, kind in (("bucket/runs", SpecError), ("nowhere://x", SpecError), ("s3://bucket/runs", MissingExtra)):
        with pytest.raises(kind):
            run = Run(quiet=True, executor={"kind": "serial", "store": store})
            Data.read(spec(source)).make(tmp_path / "data-text", run=run)
        assert not (tmp_path / "data-text.partial" / "state" / "read").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray cluster of two nodes, each started in a folder of its own: relative paths lead to different places."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    home = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        nodes = [home / "node-0", home / "node-1"]
        for node in nodes:
            node.mkdir()
        patch.chdir(nodes[0])
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        patch.chdir(nodes[1])
        made.add_node(num_cpus=1)
        (home / "driver").mkdir()
        patch.chdir(home / "driver")
        yield {"kind": "ray", "address": made.address, "store": f"file://{home}/bucket"}, nodes
        made.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_without_a_common_disk(serial, source, cluster):
    executor, nodes = cluster
    made = Data.read(spec(source)).make("data-text", run=Run(quiet=True, executor=executor))
    assert made.content == serial.content
    # Of which step is Ray's choice: while one node's worker starts, the other's may do all tasks of the first.
    assert all(list((node / "data-text.partial" / "state").glob("*/*.done")) for node in nodes)


@pytest.mark.slow
def test_a_document_that_kills_workers_elsewhere_is_set_aside_alone(tmp_path, cluster):
    executor, _ = cluster
    texts = [f"document {number} is fine" for number in range(20)]
    texts[7] = texts[13] = "this one is deadly"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    state = Path("poisoned")
    state.mkdir()
    files = list_source(str(tmp_path / "a.jsonl")).files
    models = Models.of(tmp_path / "models")
    made = read_task(state, 0, files, options=Options(), identifier=IDENTIFIER, scorers=(Deadly(),), models=models)
    with EXECUTORS.read(executor).open() as pool:
        (summary,) = Keeping(pool, executor["store"], state).map(read, [made], careful)
    assert summary["rows"] == 18 and summary["broken"] == {"killed_the_worker": {"documents": 2, "bytes": 36}}


def test_results_depend_on_code_and_on_the_tables_beside_it(tmp_path):
    def version() -> str:
        task_module._code_version.cache_clear()
        return task_module._code_version(tmp_path)

    found = [version()]
    for name in ("data/a.py", "feed/b.py", "text/c.py", "text/signals/languages.json", "text/langid/languages.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        found.append(version())
    assert len(set(found)) == len(found)
    for name in ("train/d.py", "text/__pycache__/c.pyc", "text/__pycache__/c.nbi"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    assert version() == found[-1]
