"""`--numa_binding` on the command line: refused values, what it gives to children, and which processes it binds."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.base.run import Run
from hone.cli.dispatch import main
from hone.cli.machine import binding
from hone.measure.topology.pin import SETTING, Bound
from hone.measure.topology.placement import ONE_NODE, Placement, Share


@pytest.fixture(autouse=True)
def _setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "auto")  # which is put back, whatever a test sets


def test_an_unknown_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    arguments = ["data", str(tmp_path / "a.txt"), f"--out={tmp_path / 'out'}"]
    assert main([*arguments, "--numa-binding=nodes"]) == 2
    said = capsys.readouterr().err
    assert "--numa_binding=nodes is no way to bind processes" in said and "core-complex" in said
    monkeypatch.setenv(SETTING, "all")
    assert main(arguments) == 2 and "HONE_NUMA_BINDING=all" in capsys.readouterr().err


def test_children_read_it_from_the_environment() -> None:
    binding.take({"numa_binding": "socket"})
    assert os.environ[SETTING] == "socket"


def bound_of(monkeypatch: pytest.MonkeyPatch, run: Run, why: str = "") -> list[Share | None]:
    """The shares that `bind_rank` binds a process to, where there is one of processor 0 for every process."""
    seen: list[Share | None] = []
    monkeypatch.setattr(
        binding, "place_of", lambda local, ranks, device: Placement((None if why else Share((0,), 0, 1),) * ranks, why)
    )
    monkeypatch.setattr(binding, "bind", lambda share: seen.append(share) or Bound("" if share is None else "bound"))
    binding.bind_rank(run)
    return seen


def run_of(ranks: int, device: str = "cpu", executor: str = "serial") -> Run:
    mesh = SimpleNamespace(local_world_size=ranks, world_size=ranks, local_rank=ranks - 1, leads=True)
    return Run(device=device, executor={"kind": executor}, mesh=mesh)  # type: ignore[arg-type]


def test_ranks_are_bound_and_a_process_alone_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert bound_of(monkeypatch, run_of(1)) == [], "it uses all nodes"
    assert bound_of(monkeypatch, run_of(2)) == [Share((0,), 0, 1)]
    assert "rank 0: bound" in capsys.readouterr().err
    assert bound_of(monkeypatch, run_of(2, executor="processes")) == [], "its workers would all be on its node"


def test_where_nothing_is_placed_it_is_said_to_who_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert bound_of(monkeypatch, run_of(2), ONE_NODE) == [None] and capsys.readouterr().err == ""
    monkeypatch.setenv(SETTING, "node")
    assert bound_of(monkeypatch, run_of(2), ONE_NODE) == [None] and ONE_NODE in capsys.readouterr().err


def test_one_process_on_a_cpu_says_that_it_is_not_bound_to_who_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert bound_of(monkeypatch, run_of(1)) == [] and capsys.readouterr().err == ""
    monkeypatch.setenv(SETTING, "exclusive")
    assert bound_of(monkeypatch, run_of(1)) == [] and "is not bound" in capsys.readouterr().err
