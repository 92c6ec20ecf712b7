"""Serial, processes and Ray write the same bytes, whatever happens to their workers."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.data import annotate
from hone.data.dedup import joining
from hone.data.stage import Data
from tests.data.stories import story
from tests.forking import forking

NOTICE = "This notice stands below all of them, it says nothing, and it is longer than a hundred bytes so that both edits see it."


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Six files, each a task of its own, with duplicates across them and one broken row."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(6):
        rows = [f"{story(number * 1000 + i, 240)}\n{NOTICE}" for i in range(40)] + [story(5, 240), story(7, 240)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (folder / "3.jsonl").open("a").write("{broken\n")
    return folder


SPEC = {
    "tokenizer": {"vocab_size": 400},
    "filters": ["length", "gopher_quality"],
    "dedups": ["exact", "minhash"],
    "edits": ["lines", "substrings"],
}


def make(source: Path, out: Path, executor: dict, **changes) -> Artifact:
    run = Run(quiet=True, executor=executor)
    return Data.read({"source": str(source), **SPEC, **changes}).make(out, run=run)


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(annotate, "TASK_BYTES", 1000)
    monkeypatch.setattr(joining, "SORT_KEYS", 60)  # so that bands are dealt into ranges


@pytest.fixture(scope="module")
def serial(source, tmp_path_factory) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annotate, "TASK_BYTES", 1000)
        patch.setattr(joining, "SORT_KEYS", 1 << 20)  # one process, whole bands
        return make(source, tmp_path_factory.mktemp("serial") / "data-text", {"kind": "serial"})


@pytest.mark.slow
def test_processes_write_what_one_process_writes(serial, source, tmp_path):
    made = make(source, tmp_path / "data-text", {"kind": "processes", "workers": 2})
    assert made.content == serial.content and len(list((made.folder / "documents").iterdir())) == 6
    assert made.figures["worker_memory_bytes"].value > 0


@pytest.mark.slow(seconds=40)
def test_ray_writes_what_one_process_writes(serial, source, tmp_path):
    pytest.importorskip("ray")
    made = make(source, tmp_path / "data-text", {"kind": "ray", "workers": 2, "address": "local"})
    assert made.content == serial.content


def test_every_step_took_something(serial):
    stats = json.loads((serial.folder / "stats.json").read_text())
    taken = {step["name"]: step["bytes_in"] - step["bytes_out"] for step in stats["steps"]}
    assert taken["read"] and taken["exact"] and taken["lines"]


@pytest.mark.slow
def test_a_limit_ends_at_the_same_document(source, tmp_path):
    one = make(source, tmp_path / "one", {"kind": "serial"}, max_bytes=120_000)
    two = make(source, tmp_path / "two", {"kind": "processes", "workers": 2}, max_bytes=120_000)
    assert one.content == two.content and 100_000 < one.figures["input_bytes"].value <= 120_000


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize(
    ("executor", "kills"),
    [({"kind": "serial"}, 5), ({"kind": "processes", "workers": 2}, 3)],
    ids=["serial", "processes"],
)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(serial, source, tmp_path, executor, kills):
    """Each run goes on where the one before was killed, a few tasks further; a fast one may end before its kill."""
    draw = random.Random(11)
    out = tmp_path / "data-text"
    manifests = f"{out}.partial/state/*/*.done"
    ends = []
    with forking("tests.data.killed:stage") as run_killed:
        while len(ends) < kills and not out.exists():
            arguments = (manifests, draw.randint(1, 5), draw.uniform(0, 0.01))
            ended = run_killed(out, {"source": source, **SPEC}, executor, *arguments)
            assert ended.returncode in (0, -signal.SIGKILL), ended.stderr  # its workers end by themselves
            ends.append(ended.returncode)
    assert ends.count(-signal.SIGKILL) >= 2
    made = make(source, out, executor)
    assert made.content == serial.content
    made.verify()
