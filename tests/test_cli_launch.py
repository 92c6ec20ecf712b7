"""`--nproc_per_node`: ranks of one host end together, say each thing once and save first; and verbs that ranks cannot share."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import MachineError, SpecError
from hone.cli import launch
from hone.cli.dispatch import VERBS, main
from tests.train.conftest import SHAPE, write_data

TWO = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def started(code: str, number: int = 3, out: io.StringIO | None = None) -> tuple[int, str]:
    """The exit code of ranks that run `code`, which has `rank` and `os`, and what the launcher printed."""
    out = out or io.StringIO()
    head = "import os, signal, sys; rank = int(os.environ['RANK'])\n"
    with launch.Ranks(number, [sys.executable, "-S", "-c", head + code], os.environ, out) as ranks:
        ended = ranks.wait()
    assert all(process.poll() is not None for process in ranks.processes)
    return ended, out.getvalue()


def test_ranks_say_each_thing_once():
    code = "if rank: print('same'); print('own', rank, file=sys.stderr); print('twice'); print('twice')"
    ended, said = started(code)
    lines = sorted(said.splitlines())
    assert ended == 0 and [line for line in lines if "own" in line] == ["[rank 1] own 1", "[rank 2] own 2"]
    assert sum("same" in line for line in lines) == 1 and sum("twice" in line for line in lines) == 2


def test_the_first_failure_ends_all(monkeypatch):
    """Rank 2 is killed; the others wait for it, as in a transfer between GPUs."""
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    ended, said = started("os.kill(os.getpid(), 9) if rank == 2 else signal.pause()")
    assert ended == 128 + signal.SIGKILL
    assert "rank 2 was ended by SIGKILL; the kernel does that when memory is short" in said
    assert "ranks 0, 1 did not end in 0 s after rank 2 did, and are killed" in said
    assert started("sys.exit(2)")[0] == 2


class Asking(io.StringIO):
    """Sends this process a signal, as Ctrl-C does, when ranks 1 and 2 are ready."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._ready = number, 0

    def write(self, text: str) -> int:
        self._ready += "ready" in text
        if self._ready == 2 and "ready" in text:
            os.kill(os.getpid(), self._number)
        return super().write(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(number, tmp_path):
    """The ranks go on until they have saved."""
    ready = tmp_path / "ready"  # of rank 0, whose output is not read here: before it a signal would end it
    code = (
        f"number = signal.Signals({int(number)}); signal.pthread_sigmask(signal.SIG_BLOCK, [number]); import time\n"
        f"if not rank: open({str(ready)!r}, 'w').close()\n"
        f"while not os.path.exists({str(ready)!r}): time.sleep(0.01)\n"
        "if rank: print('ready', rank, flush=True)\n"
        "signal.sigwait([number])\n"
        "if rank: print('saved', rank, signal.sigpending(), flush=True)\n"
        "sys.exit(128 + number)"
    )
    before = signal.getsignal(number)
    ended, said = started(code, 3, Asking(number))
    assert ended == 128 + number and "ended by" not in said
    assert "[rank 1] saved 1 set()" in said and "[rank 2] saved 2 set()" in said
    assert signal.getsignal(number) is before


def test_the_command_of_a_rank(monkeypatch):
    words = ["train", "--nproc_per_node=2", "data", "--nproc-per-node", "4", "--out=x", "--", "--nproc_per_node=3"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hone"])
    kept = ["train", "data", "--out=x", "--", "--nproc_per_node=3"]
    assert launch.command_of(words) == [sys.executable, "-P", "-m", "hone", *kept]
    monkeypatch.setattr(sys, "argv", ["hone/__main__.py"])
    assert launch.command_of(words) == [sys.executable, "-m", "hone", *kept]


def test_what_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "_gpus", lambda: 2)

    def asked(given: str, verb: str = "train", environment: dict | None = None, **options: str) -> int:
        return launch.ranks_to_start(verb, {launch.OPTION: given, **options}, environment or {})

    assert asked("4") == 4 and asked("1") == 1 and asked("2", device="cuda") == 2 and asked("gpu", device="cuda") == 2
    assert launch.ranks_to_start("train", {}, {}) == 1
    with pytest.raises(MachineError, match="nproc_per_node=3, and torch sees 2 GPUs: each rank has one"):
        asked("3", device="cuda")
    with pytest.raises(SpecError, match="one device cuda:1"):
        asked("2", device="cuda:1")
    with pytest.raises(SpecError, match=r"this process is one that torchrun started \(RANK=1, WORLD_SIZE=2\)"):
        asked("2", environment=TWO)
    for wrong in ("0", "many", "-1", "gpu"):
        with pytest.raises(SpecError, match="is no number of ranks"):
            asked(wrong)
    with pytest.raises(SpecError, match="hone eval has no option --nproc_per_node"):
        asked("2", "eval")
    options = {launch.OPTION: "4", "plan": "true"}
    assert launch.ranks_to_start("train", options, {}) == 1 and options == {"plan": "true", "mesh": "4"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_ranks_cannot_share_says_so(verb, monkeypatch, capsys):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    if verb in (*launch.SHARED, *launch.PLANNED):
        launch.check_world(verb)
        return
    assert main([verb]) == 2
    said = capsys.readouterr().err
    assert f"hone {verb} runs in one process" in said and "torchrun started 2" in said and "fix: " in said
    assert main([verb, "--help"]) in (0, 2) and "torchrun started" not in capsys.readouterr().err


def test_a_recipe_that_ranks_cannot_share_says_so(tmp_path, monkeypatch, capsys):
    for name, value in {**TWO, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    recipe = tmp_path / "texts.yaml"
    recipe.write_text("line: texts\nstages:\n- {stage: data, name: text, source: x}\n")
    assert main(["run", str(recipe)]) == 2
    assert "2 ranks, and no stage of the recipe shares its work among them: data-text" in capsys.readouterr().err


def test_a_rank_saves_and_ends_when_its_launcher_dies(monkeypatch):
    """As `Run.ending` does at SIGTERM; a process that nobody launched is left alone."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    ended, alive = os.pipe()
    environment = {launch.LAUNCHER: str(ended)}
    try:
        launch.follow(environment)
        assert not environment and not os.get_inheritable(ended), "processes that the rank starts are no ranks"
        os.close(alive)
        assert told.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    threads = threading.active_count()
    launch.follow({})
    assert threading.active_count() <= threads


@pytest.mark.slow(seconds=40)
def test_two_ranks_train_save_at_ctrl_c_and_go_on(tmp_path):
    out = tmp_path / "train-base"
    sizes = [f"--model.{name}={value}" for name, value in SHAPE.model_dump(exclude_defaults=True).items()]
    words = ["train", str(write_data(tmp_path / "data")), f"--out={out}", "--seq_len=32", "--batch_size=4", *sizes]
    command = [sys.executable, "-m", "hone", *words, "--nproc_per_node=2", "--quiet"]
    log, steps = Path(f"{out}.partial") / "steps.jsonl", 240  # of 12 ms and more: seconds to be interrupted in
    with subprocess.Popen([*command, f"--steps={steps}"], stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 300
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            assert time.monotonic() < deadline and child.poll() is None, "the ranks do nothing"
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        said = child.stderr.read()
    saved = len(read_jsonl(log))
    assert child.returncode == 130
    assert f"ended after step {saved} of {steps}, which is saved; the same command resumes" in said, said
    ended = subprocess.run([*command, f"--steps={steps}"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    made = Artifact.read(out)
    assert made.figures["num_ranks"].value == 2 and made.figures["num_steps"].value == steps
    assert ended.stdout.count("num_ranks") == 1
