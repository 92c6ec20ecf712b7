"""Slurm arrays, with an sbatch that runs its elements here: the same bytes, lost elements replaced, errors told."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from hone.base.errors import MachineError, SpecError
from hone.data import EXECUTORS
from hone.data.executors.task import Task

SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[-1]).read()
home = {home!r}
count = int(re.search(r"--array=0-(\\d+)", text)[1]) + 1
open(home + "/scripts", "a").write(text)
job = str(len(os.listdir(home + "/jobs")) + 1)
pids = []
for element in range(count):
    environment = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(element)}}
    log = open(re.search(r"--output=(.*)", text)[1].replace("%a", str(element)), "w")
    pids.append(subprocess.Popen(["sh", sys.argv[-1]], env=environment, stdout=log, stderr=log, start_new_session=True).pid)
open(home + "/jobs/" + job, "w").write(" ".join(map(str, pids)))
print(job)
"""
SQUEUE = """#!{python}
import os, sys
path = {home!r} + "/jobs/" + sys.argv[-1]
if not os.path.exists(path):
    sys.exit("slurm_load_jobs error: Invalid job id specified")
for pid in open(path).read().split():
    try:
        state = open("/proc/" + pid + "/stat").read().rsplit(")", 1)[1].split()[0]
    except OSError:
        continue
    if state != "Z":
        print(sys.argv[-1] + "_0 R")
"""
SCANCEL = """#!{python}
import os, signal, sys
for pid in open({home!r} + "/jobs/" + sys.argv[-1]).read().split():
    try:
        os.killpg(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "cluster"
    (home / "jobs").mkdir(parents=True)
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        path = home / name
        path.write_text(text.format(python=sys.executable, home=str(home)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    return home


def square(folder: Path, number: int, how: str) -> dict:
    mark = Path(how.partition(":")[2])
    if how.startswith("dies once") and not mark.exists():
        mark.touch()
        os._exit(1)
    if how == "dies":
        os._exit(1)
    if how == "raises":
        raise SpecError("three is bad", fix="take four")
    (folder / f"{number}.txt").write_text(str(number**2))
    return {"rows": number**2}


def tasks(folder: Path, hows: list[str]) -> list[Task]:
    return [
        Task(f"t{number}", folder / "state", {"number": number, "how": how}, [number])
        for number, how in enumerate(hows)
    ]


def slurm(**more):
    return EXECUTORS.read({"kind": "slurm", "workers": 2, "poll_s": 0.05, **more})


def test_tasks_run_in_arrays_and_a_lost_element_is_replaced(cluster, tmp_path):
    hows = ["", "", f"dies once:{tmp_path}/mark", "", "", ""]
    with slurm(options="--partition=cpu --mem=1G").open() as pool:
        found = list(pool.map(square, tasks(tmp_path, hows)))
        again = list(pool.map(square, tasks(tmp_path, hows)))
    assert found == again == [{"rows": number**2} for number in range(6)]
    assert (
        len(list((cluster / "jobs").iterdir())) == 2
    )  # one for all, one for the task that died; none for the second map
    script = (cluster / "scripts").read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --partition=cpu --mem=1G\n" in script
    assert (tmp_path / "state" / "5.txt").read_text() == "25" and pool.peak_memory_bytes > 1 << 20
    assert not list(tmp_path.glob(".slurm-*"))


def test_errors_are_raised_and_a_task_that_kills_is_given_up_or_replaced(cluster, tmp_path):
    with slurm().open() as pool:
        results = pool.map(square, tasks(tmp_path, ["", "raises"]))
        assert next(results) == {"rows": 0}
        with pytest.raises(SpecError, match="three is bad"):
            next(results)
        with pytest.raises(MachineError, match=r"t0 killed its worker 2 times \(see .*log"):
            list(pool.map(square, tasks(tmp_path / "b", ["dies"])))

        def rescue(task: Task) -> Task:
            return task.given(number=7, how="")

        assert list(pool.map(square, tasks(tmp_path / "c", ["dies", ""]), rescue)) == [{"rows": 49}, {"rows": 1}]


def test_mistakes_are_said(cluster, tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"--array=1-2 is set by hone"):
        slurm(options=["--array=1-2"])
    with pytest.raises(SpecError, match="'cpu' is no option"):
        slurm(options="cpu")
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified' >&2\nexit 1\n")
    with slurm().open() as pool, pytest.raises(MachineError, match="sbatch refused the array: invalid partition"):
        list(pool.map(square, tasks(tmp_path, [""])))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SpecError, match="there is no sbatch on this machine"), slurm().open():
        pass


@pytest.mark.slow(seconds=35)
def test_a_stage_on_slurm_writes_the_same_bytes(cluster, tmp_path, monkeypatch):
    from tests.data.executors.test_same_bytes import make
    from tests.data.stories import story

    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text(story(number, 900) + "<|endoftext|>" + story(7, 900))
    one = make(tmp_path / "in", tmp_path / "one", {"kind": "serial"})
    two = make(tmp_path / "in", tmp_path / "two", {"kind": "slurm", "workers": 2, "poll_s": 0.1})
    assert one.content == two.content
