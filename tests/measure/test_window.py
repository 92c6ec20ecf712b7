"""Windows see time and memory, and do not disturb one another."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hone.measure import memory
from hone.measure.window import Window

MIB = 1 << 20


def touch(size: int) -> None:
    """Uses `size` bytes for a moment; pages of its own, so they go back at once."""
    np.ones(size, np.uint8)


@pytest.fixture(params=["clear_refs", "sampler"])
def meter(request, monkeypatch):
    """Both ways to a peak: resetting the kernel's mark, and samples where that is not allowed."""
    if request.param == "sampler":
        monkeypatch.setattr(memory, "_CLEAR", memory.Path("/proc/self/does-not-exist/clear_refs"))
        monkeypatch.setattr(memory, "resident_bytes", told_of_samples(memory.resident_bytes))
    monkeypatch.setattr(memory, "_WATCHES", {})
    return request.param


SAMPLES = threading.Semaphore(0)
"""Released whenever the sampler begins to read."""


def told_of_samples(read):
    def reading() -> int:
        if threading.current_thread().name == "hone-memory":
            SAMPLES.release()
        return read()

    return reading


def notice(meter: str) -> None:
    """Waits until the meter has seen the memory that is in use now, however seldom a busy machine runs the thread of samples."""
    if meter == "sampler":
        while SAMPLES.acquire(blocking=False):
            pass
        for _ in range(2):  # when one more begins, one that began from here on has been kept
            assert SAMPLES.acquire(timeout=60)


@pytest.mark.slow
def test_peak_and_growth(meter):
    with Window() as window:
        held = np.ones(200 * MIB, np.uint8)
        notice(meter)
        time.sleep(0.2)
        del held
    assert 195 * MIB < window.memory_growth_bytes < 240 * MIB
    assert window.peak_memory_bytes == window.start_memory_bytes + window.memory_growth_bytes
    assert 0.2 < window.time_s < 60
    with Window() as after:
        notice(meter)
    assert after.memory_growth_bytes < 20 * MIB


@pytest.mark.slow
def test_an_inner_window_does_not_lose_the_outer_peak(meter):
    with Window() as outer:
        held = np.ones(150 * MIB, np.uint8)
        notice(meter)
        del held
        with Window() as inner:
            held = np.ones(50 * MIB, np.uint8)
            notice(meter)
            del held
        with Window() as idle:
            notice(meter)
    assert 145 * MIB < outer.memory_growth_bytes < 190 * MIB
    assert 45 * MIB < inner.memory_growth_bytes < 90 * MIB
    assert idle.memory_growth_bytes < 20 * MIB


@pytest.mark.slow
def test_an_inner_peak_belongs_to_the_outer_one_too(meter):
    with Window() as outer, Window() as inner:
        held = np.ones(100 * MIB, np.uint8)
        notice(meter)
        del held
    assert inner.memory_growth_bytes > 95 * MIB and outer.memory_growth_bytes > 95 * MIB


@pytest.mark.slow
def test_windows_may_overlap_across_threads(meter):
    begun, go_on = threading.Event(), threading.Event()
    seen = []

    def other():
        with Window() as window:
            begun.set()
            go_on.wait()
        seen.append(window)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with Window():
        held = np.ones(100 * MIB, np.uint8)
        notice(meter)
        del held
    go_on.set()
    thread.join()
    assert seen[0].memory_growth_bytes > 95 * MIB


def test_a_sample_from_before_a_reset_does_not_come_after_it(monkeypatch):
    """Between reading and keeping it another thread may run: what it read is of the window before."""
    reads, began, may_end = iter([100, 900]), threading.Event(), threading.Event()

    def slow() -> int:
        found = next(reads, 100)
        if found == 900:
            began.set()
            may_end.wait(0.2)  # the reset must not come in between
        return found

    monkeypatch.setattr(memory, "resident_bytes", slow)
    sampler = memory._Sampler()
    assert began.wait(100)
    first = sampler.peak_and_reset()
    may_end.set()
    sampler.stop()
    assert (first, sampler.peak_and_reset()) == (900, 100)


def test_figures_and_an_error_inside():
    window = Window()
    with pytest.raises(KeyError), window:
        raise KeyError("inside")
    figures = {figure.name: figure for figure in window.figures()}
    assert list(figures) == ["time_s", "peak_memory_bytes", "memory_growth_bytes", "energy_j"]
    assert figures["time_s"].value > 0 and figures["peak_memory_bytes"].value > 0
    if figures["energy_j"].value is None:
        assert figures["energy_j"].note.startswith("no energy")
    assert not memory._watch("cpu").meters
