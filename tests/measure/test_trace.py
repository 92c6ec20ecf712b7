"""Power traces: rows that are written and read back, what they add up to, and a window that records one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base.errors import ArtifactError
from hone.measure import energy, window
from hone.measure.trace import COLUMNS, Recorder, Sample, figures, read_trace, sample_of, summary
from hone.measure.window import Window
from tests.measure.clocks.plant import Plant

PUBLISHED = ",".join(COLUMNS)


def recorded(path: Path, gpu: Plant, seconds: int) -> Recorder:
    recorder = Recorder("cuda:0", path, gpu=gpu, clock=lambda: gpu.now_s)
    recorder._run = lambda: None  # the thread's rows are written here, by the plant's clock
    recorder.start()
    for _ in range(seconds * 10):
        gpu.run(0.1)
        recorder.look()
    recorder.stop()
    return recorder


def test_what_is_recorded_is_read_back(tmp_path):
    gpu, path = Plant(leak=0.0, default_w=600.0), tmp_path / "power.csv"
    recorded(path, gpu, 20)
    assert path.read_text().splitlines()[0] == PUBLISHED
    rows = read_trace(path)
    assert rows[-1] == sample_of(gpu, "cuda:0", gpu.now_s)
    found = summary(rows)
    assert found.joules == pytest.approx(gpu.joules, abs=0.01) and found.seconds == pytest.approx(20.0)
    assert found.mean_w == pytest.approx(gpu.joules / 20) and found.peak_w <= 600.0
    assert found.capped_s == pytest.approx(20.0, abs=0.2) and found.hot_s == 0.0


def test_power_alone_adds_up_to_what_a_counter_counts(tmp_path):
    gpu = Plant(counts=False)
    recorded(tmp_path / "power.csv", gpu, 30)
    assert summary(read_trace(tmp_path / "power.csv")).joules == pytest.approx(gpu.joules, rel=0.02)


def test_a_killed_one_is_continued_and_a_cut_off_row_left_out(tmp_path):
    gpu, path = Plant(), tmp_path / "power.csv"
    recorded(path, gpu, 2)
    count = len(read_trace(path))
    recorded(path, gpu, 1)
    assert len(read_trace(path)) == count + 12 and path.read_text().count(PUBLISHED) == 1
    with open(path, "a") as file:
        file.write("3.14,cuda:0,5")
    assert len(read_trace(path)) == count + 12


def test_a_gap_is_not_filled():
    """A process that was killed and came back after a minute: nobody knows what was drawn meanwhile, but a counter."""
    times = [*range(10), *range(70, 80)]
    shown = [Sample(float(at), "cuda:0", 100.0, throttle=4) for at in times]
    found = summary(shown)
    assert found.joules == pytest.approx(1800.0) and found.mean_w == pytest.approx(100.0)
    assert (found.seconds, found.gaps_s, found.capped_s) == (79.0, 61.0, 18.0)
    assert "61 of 79 s have no readings" in figures(shown)[0].note
    counted = summary([row._replace(energy_mj=int(row.timestamp_s) * 50_000) for row in shown])
    assert counted.joules == pytest.approx(79 * 50.0) and counted.mean_w == pytest.approx(50.0)


def test_what_a_device_does_not_show_is_empty(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{PUBLISHED}\n1.0,cuda:0,100.5,,,,,,\n2.0,cuda:0,101.5,,,,,,\n")
    rows = read_trace(path)
    assert rows[0] == Sample(1.0, "cuda:0", 100.5) and summary(rows).joules == 101.0
    shown = {one.name: one for one in figures(rows, "quoted", "from elsewhere")}
    assert shown["power_peak_w"].value == 101.5 and shown["power_mean_w"].how == "quoted"
    assert summary([]).joules is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no power trace"),
        ("a,b\n1,2\n", "no power trace"),
        (f"{PUBLISHED}\n1,cuda,x,,,,,,\n", "line 2"),
        (f"{PUBLISHED}\n1\n", "line 2"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ArtifactError, match=said):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(ArtifactError, match="cannot read"):
        read_trace(tmp_path / "none.csv")


@pytest.fixture
def plant(monkeypatch) -> Plant:
    """A GPU for windows of "cuda", whose memory and waiting are those of no device."""
    found = Plant(leak=0.0)
    monkeypatch.setattr(energy, "open_gpu", lambda device: (found, f"NVML: {device}"))
    monkeypatch.setattr(window.Window, "_wait", lambda self: None)
    monkeypatch.setattr(window, "PeakMeter", lambda device: window_memory())
    monkeypatch.setattr(window, "idle_watts", lambda device: 75.0)
    return found


def window_memory():
    class Memory:
        start_bytes = peak_bytes = 1

        def open(self) -> None: ...
        def close(self) -> None: ...

    return Memory()


def test_a_window_reads_the_counter_at_both_ends(plant, monkeypatch):
    with Window("cuda:0") as measured:
        plant.run(10.0)
        measured._begun -= 10.0
    assert measured.energy_j == pytest.approx(7000.0, abs=0.01) and measured.energy_note == "NVML: cuda:0"
    found = {one.name: one for one in measured.figures()}
    assert (
        found["energy_above_idle_j"].value == pytest.approx(6250.0, abs=50.0)
        and "75 W at rest" in found["energy_above_idle_j"].note
    )


def test_a_short_window_is_labelled_and_one_without_a_tick_is_none(plant):
    with Window("cuda:0") as short:
        plant.run(0.2)
    assert short.energy_j == pytest.approx(140.0, abs=0.01) and "uncertain: shorter than 1 s" in short.energy_note
    with Window("cuda:0") as nothing:
        pass
    assert nothing.energy_j is None and "its counter did not move" in nothing.energy_note
    assert "energy_above_idle_j" not in {one.name for one in nothing.figures()}


def test_without_a_counter_its_power_is_added_up(plant):
    plant.counts = False
    counter, note = energy.counter_of(plant, "NVML: x", clock=lambda: plant.now_s)
    before = counter.read()
    for _ in range(100):
        plant.run(0.05)
        counter.read()
    assert counter.joules_between(before, counter.read()) == pytest.approx(plant.joules, rel=0.01)
    assert note == "NVML: x, power read 20 times a second"


def test_mig_has_no_reading(monkeypatch):
    monkeypatch.setattr(energy, "open_gpu", lambda device: (None, "the GPU is divided by MIG"))
    meter = energy.Meter("cuda:0")
    meter.start()
    assert meter.joules() is None and meter.note == "no energy: the GPU is divided by MIG"
    assert energy.at_rest("cuda:0") is None


def test_a_window_without_a_device_to_trace_says_so(tmp_path):
    with Window("cpu", tmp_path / "power.csv") as measured:
        pass
    peak = measured.figures()[-1]
    assert peak.name == "power_peak_w" and peak.value is None and "RAPL shows" in peak.note


def test_rows_of_one_moment_are_read_whatever_they_show(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text(",".join(COLUMNS) + "\n1,cuda:0,,,,,,,\n1,cuda:0,100,,,,,,\n")
    assert [row.power_w for row in read_trace(path)] == [None, 100.0]


def test_a_counter_that_begins_anew_counts_on():
    rows = [Sample(float(at), "cuda:0", 100.0, mj) for at, mj in enumerate((5000, 6000, 10, 2010))]
    assert summary(rows).joules == pytest.approx(3.0)
