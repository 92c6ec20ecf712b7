"""`hone calibrate --report` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.cli.dispatch import main
from hone.cli.machine import probe as command
from hone.measure import calibrate as micro
from hone.measure.calibration import Calibration
from hone.measure.probe import bandwidth, latency, run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick"], "--quick shortens the probe of --report"),
        (["--report", "--quick=3"], "--quick has no value, got 3"),
        (["--report=here"], "--report=here is a file"),
        (["--reprot"], "no option --reprot"),
    ],
)
def test_mistakes(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").write_text("")
    assert main(["calibrate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_report_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = Calibration(
        device="x", threads=1, torch="2", read_bytes_per_s=1, copies=(), matmuls=(), attentions=(), op_s=1, exp_per_s=1
    )
    monkeypatch.setattr(micro, "calibrate_all", lambda *_, **__: made)  # it has tests of its own
    monkeypatch.setattr(bandwidth, "stream_bytes", lambda *_: 4 << 20)
    monkeypatch.setattr(latency, "largest_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(run, "_QUICK_FILE_BYTES", 4 << 20)
    assert main(["calibrate", "--report", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "read by all threads" in out and "memory" in out and "GB/s" in out
    found = json.loads((tmp_path / command.FOLDER / "probe.json").read_text())
    assert found["version"] == 1 and found["quick"] and found["levels"][0]["name"] == "registers"
    assert len([*(tmp_path / "cache/hone").glob("probe-*.json")]) == 1, "it is kept beside the calibration"


def test_times_and_rates_in_words() -> None:
    assert [command.time_words(one) for one in (1.64e-9, 35.2e-6, 2e-3, 3.0)] == ["1.64 ns", "35.2 us", "2 ms", "3 s"]
    assert [command.rate_words(one) for one in (11.6e9, 4.26e12)] == ["11.6 GB/s", "4.26 TB/s"]
