"""RAPL counters read from a made-up sysfs: domains, wraparound, absence, refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.measure import energy
from hone.measure.energy import Meter, rapl_counters


def domain(root: Path, folder: str, name: str, energy_uj: int, range_uj: int = 1_000_000) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(name + "\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path


def test_packages_and_dram_count_once(tmp_path):
    domain(tmp_path, "intel-rapl:0", "package-0", 10)
    domain(tmp_path, "intel-rapl:0:0", "core", 10)
    domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    domain(tmp_path, "intel-rapl:1", "psys", 10)
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 10)
    (tmp_path / "intel-rapl").mkdir()
    counters, note = rapl_counters(tmp_path)
    assert [counter.name for counter in counters] == ["package-0", "dram"]
    assert note == "RAPL: package-0, dram"


def test_joules_and_wraparound(tmp_path, monkeypatch):
    package = domain(tmp_path, "intel-rapl:0", "package-0", 999_000)
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    meter = Meter("cpu")
    meter.start()
    (package / "energy_uj").write_text("999500")
    assert meter.joules() == pytest.approx(500e-6)
    (package / "energy_uj").write_text("200")  # over the range of 1,000,000
    assert meter.joules() == pytest.approx(1200e-6)
    (package / "energy_uj").write_text("999000")
    (package / "energy_uj").write_text("100")
    meter.stop()


def test_absent_is_none_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    meter = Meter("cpu")
    meter.start()
    assert meter.joules() is None and "has no RAPL" in meter.note
    meter.stop()


def test_refused_is_none_and_says_so(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        monkeypatch.setattr(energy.RaplCounter, "read", lambda self: (_ for _ in ()).throw(PermissionError()))
    package = domain(tmp_path, "intel-rapl:0", "package-0", 1)
    (package / "energy_uj").chmod(0)
    counters, note = rapl_counters(tmp_path)
    assert counters == [] and "is not readable" in note
