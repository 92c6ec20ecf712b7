"""Several ranks: rank 0 makes the artifact, the others wait for it, and an error ends all of them with a message."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import MachineError
from hone.base.ranks import Mesh
from hone.base.run import Run
from tests.forking import forking
from tests.ranked import reserved_port

STAGE = """
import os, sys, time
from pathlib import Path
from typing import ClassVar
from hone.base.errors import HoneError, SpecError
from hone.base.plan import Plan
from hone.base.ranks import Mesh
from hone.base.stage import Stage

meet, waits = Mesh._meet, Path(sys.argv[1]) / "waits"

def meeting(self, value=None):
    if not self.leads:
        waits.touch()  # it has found the other one: from here on it waits for what rank 0 does
    return meet(self, value)

Mesh._meet = meeting

class Dig(Stage):
    stage: ClassVar = "dig"
    trouble: str = ""

    def plan(self, facts, machine):
        if self.trouble == "refused":
            raise SpecError("nothing to dig with", fix="bring a spade")
        return Plan()

    def run(self, plan, draft, parents, run):
        while not waits.exists():
            time.sleep(0.01)
        if self.trouble == "bug":
            raise ZeroDivisionError("a bug")
        if self.trouble == "killed":
            os.kill(os.getpid(), 9)
        (draft.folder / "rank").write_text(os.environ["RANK"])
        run.say("dug")

for name in sys.argv[2:]:
    try:
        made = Dig(trouble=name).make(Path(sys.argv[1]) / f"dig-{name or 'fine'}")
        print("made by", (made.folder / "rank").read_text())
    except HoneError as error:
        print(f"{type(error).__name__}: {error.what}")
        if name == "killed":
            sys.exit(3)
"""


def ranks(folder: Path, *troubles: str) -> list[subprocess.CompletedProcess]:
    """Two processes as torchrun would start them, on one machine."""
    (folder / "stage.py").write_text(textwrap.dedent(STAGE))
    begun = []
    with reserved_port() as port:
        for rank in range(2):
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            environment = {**os.environ, **where, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, folder / "stage.py", folder, *troubles]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            begun.append(subprocess.Popen(command, env=environment, **pipes))
        return [subprocess.CompletedProcess(one.args, one.wait(300), *one.communicate()) for one in begun]


@pytest.mark.slow
def test_rank_0_makes_one_artifact_and_errors_reach_every_rank(tmp_path):
    done = ranks(tmp_path, "", "refused", "bug")
    both = ["made by 0", "SpecError: nothing to dig with"]
    assert done[1].stdout.splitlines() == [*both, "MachineError: rank 0 failed: ZeroDivisionError: a bug"]
    assert done[1].returncode == 0 and "dug" not in done[1].stderr
    assert done[0].stdout.splitlines() == both, "rank 0 shows the bug itself"
    assert "ZeroDivisionError: a bug" in done[0].stderr and "dug" in done[0].stderr
    assert sorted(path.name for path in tmp_path.glob("dig-*")) == ["dig-fine"]


@pytest.mark.slow
def test_a_rank_0_that_is_killed_leaves_no_rank_waiting(tmp_path):
    done = ranks(tmp_path, "killed")
    assert done[0].returncode == -9
    assert done[1].returncode == 3 and "Lost: rank 1 lost the other ranks" in done[1].stdout


LEAVING = """
import atexit, os, threading
import torch.distributed as dist
from hone.base import ranks
from hone.base.ranks import Mesh

ranks._LEAVE_S = 200.0  # the machine may be busy; what is shown is that it ends at all
end = dist.destroy_process_group

def ended():
    end()
    os.write(1, b"ended\\n")

def refused(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

dist.destroy_process_group = ended
os.environ["RANK"] = str(int(os.fork() == 0))
assert sum(Mesh.from_environment().gather(int(os.environ["RANK"]))) == 1
atexit.register(setattr, threading.Thread, "start", refused)  # what is registered last runs first
"""


def test_ranks_end_where_python_starts_no_thread_at_its_exit():
    """As 3.12.0 to 3.12.2: gloo's threads end all the same."""
    with reserved_port() as port:
        where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        begun = {"env": {**os.environ, **where}, "capture_output": True, "text": True, "timeout": 300}
        one = subprocess.run([sys.executable, "-c", LEAVING], **begun)
    assert one.returncode == 0 and one.stdout.splitlines() == ["ended"] * 2, one.stderr


def test_the_mesh_is_what_torchrun_says():
    assert Mesh.from_environment({}) == Mesh(0, 0, 1)
    there = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    assert Mesh.from_environment(there) == Mesh(5, 1, 8)
    assert Mesh.from_environment({**there, "LOCAL_WORLD_SIZE": "4"}) == Mesh(5, 1, 8, 4)
    assert not Mesh.from_environment(there).leads and Mesh().leads
    for wrong in ({"RANK": "8"}, {"WORLD_SIZE": "eight"}, {"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "9"}):
        with pytest.raises(MachineError, match="the environment says RANK="):
            Mesh.from_environment({**there, **wrong})
    for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        half = {name: value for name, value in there.items() if name != missing}
        with pytest.raises(MachineError, match=rf"the environment says .*{missing}=\(not set\)"):
            Mesh.from_environment(half)
    assert Mesh.from_environment({"WORLD_SIZE": "1"}) == Mesh()


def test_one_process_needs_no_other():
    assert Run().mesh.from_leader(lambda: 3) == 3
    assert pickle.loads(pickle.dumps(Run())) == Run()


@pytest.mark.slow
def test_errors_of_one_rank_reach_all():
    with forking("tests.base.ranks_of_a_mesh:collectives") as call:
        ended = call(3)
    assert ended.returncode == 0, ended.stderr
    for code, _, errors in ended.result:
        assert code == 0, errors
    found = [result for _, result, _ in ended.result]
    parts = [np.roll(np.array([1.0, 1e8, -1e8, 0.5, 3.0], np.float32), rank) for rank in range(3)]
    for one in found:
        assert one["sum"] == ((parts[0] + parts[1]) + parts[2]).tolist(), "in the order of the ranks"
        assert one["counts"] == [[3], [6]] and one["largest"] == ["2.0", "nan"]
        assert one["joined"] == [[1, 1], [2, 2], [2, 2]] and one["dtype"] == "torch.bfloat16"
        codes = {f"codes{rank}": [[rank, 2.0]] for rank in range(3)}
        assert one["exchanged"] == codes | {f"none{rank}": [] for rank in range(3)}
        assert one["gathered"] == [0, 10, 20] and one["leader"] == "of 0" and one["after"] == [1, 1, 1]
    bugs = ["MachineError: rank 1 failed: ZeroDivisionError: a bug", "ZeroDivisionError: a bug"]
    assert [one["told"] for one in found] == [["SpecError: rank 1: no", bugs[rank == 1]] for rank in range(3)]
    assert [one["closed"] for one in found] == [[True, True, False]] * 3, (
        "those that are told break off what is under way, too"
    )


def test_one_rank_gets_back_what_it_gives():
    mesh, x = Mesh(), np.ones(2)
    assert mesh.sum(x) is mesh.largest(x) is mesh.joined(x) is x and mesh.exchange({"x": x}, "cpu")["x"] is x
    assert mesh.gather(3) == [3] and mesh.place("cuda:3") == "cuda:3"


def test_a_rank_has_a_gpu_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert Mesh(1, 1, 4).place("cuda") == "cuda:1" and Mesh(1, 1, 4).place("cpu") == "cpu"
    with pytest.raises(MachineError, match="local rank 2 has no GPU: torch sees 2"):
        Mesh(2, 2, 4).place("cuda")
    with pytest.raises(MachineError, match="4 ranks and one device cuda:0"):
        Mesh(1, 1, 4).place("cuda:0")
