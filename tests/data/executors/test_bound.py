"""Workers of the data stage that are bound to cores: each to its own, also the one that replaces a dead one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hone.data import EXECUTORS
from hone.data.executors.task import Task
from hone.measure.topology.pin import SETTING


def where(folder: Path, number: int, seconds: float) -> dict:
    time.sleep(seconds)  # so that the other worker has the next task
    return {"rows": number, "cpus": sorted(os.sched_getaffinity(0)), "pid": os.getpid()}


def die_once(folder: Path, number: int, mark: str) -> dict:
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return where(folder, number, 0.0)


def test_each_worker_has_cores_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    monkeypatch.setenv(SETTING, "exclusive")
    before = os.sched_getaffinity(0)
    with EXECUTORS.read({"kind": "processes", "workers": 2}).open() as pool:
        tasks = [Task(f"t{n}", tmp_path / f"t{n}", {"number": n, "seconds": 0.5}, None) for n in range(4)]
        found = list(pool.map(where, tasks))
    shares = {one["pid"]: tuple(one["cpus"]) for one in found}
    assert len(shares) == len(set(shares.values())) == 2
    assert not set.intersection(*(set(cpus) for cpus in shares.values())) and os.sched_getaffinity(0) == before


def test_a_replaced_worker_gets_the_share_of_the_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "exclusive")
    with EXECUTORS.read({"kind": "processes", "workers": 1}).open() as pool:
        task = Task("t", tmp_path / "t", {"number": 1, "mark": str(tmp_path / "mark")}, None)
        found = list(pool.map(die_once, [task]))
    assert set(found[0]["cpus"]) <= os.sched_getaffinity(0) and (tmp_path / "mark").exists()
