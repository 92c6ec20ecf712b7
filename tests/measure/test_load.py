"""What others take of the processors, from a made-up /proc/stat, and from the load average where there is none."""

from __future__ import annotations

import os

import pytest

from hone.measure.load import Load, processor_load

TICK = os.sysconf("SC_CLK_TCK")


def stat(tmp_path, *busy_s: float, idle_s: float = 100.0):
    """A file like /proc/stat in which processor i has worked busy_s[i] seconds, in unlike ways."""
    lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
    for number, seconds in enumerate(busy_s):
        fields = [0.3, 0.1, 0.2, 0, 0, 0.1, 0.1, 0.2]
        ticks = [round(part * seconds * TICK) for part in fields]
        ticks[3], ticks[4] = round(idle_s * TICK), 7 * TICK
        lines.append(f"cpu{number} {' '.join(map(str, ticks))} 0 0")
    path = tmp_path / "stat"
    path.write_text("\n".join([*lines, "intr 1 2 3", "btime 5"]) + "\n")
    return path


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0))


def looked(path, at_s, own_s):
    return processor_load(path, lambda: at_s, lambda: own_s)


def test_what_is_not_ours_is_others(tmp_path):
    before = looked(stat(tmp_path, 10, 20, 30), 100, 3)
    after = looked(stat(tmp_path, 14, 23, 99, idle_s=103), 105, 6)  # the third processor is not for this process
    assert before.num_processors == 2
    assert after.others_since(before) == pytest.approx((4 + 3 - 3) / 5)


def test_load_of_others_is_never_negative(tmp_path):
    before, after = looked(stat(tmp_path, 10, 20), 100, 3), looked(stat(tmp_path, 12, 20), 102, 5.1)
    assert after.others_since(before) == 0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "cpu  1 2 3",
        "cpu0 1 2 3 4 5 6 7 8 0 0",
        "cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0",
        "cpu0 a b\ncpu1 c d",
    ],
)
def test_a_system_that_does_not_tell_has_its_load_average(tmp_path, text):
    path = tmp_path / "stat"
    if text is not None:
        path.write_text(text)
    before, after = looked(path, 100, 3), looked(path, 105, 6)
    assert before.busy_s is None and after.others_since(before) == 1.5


def test_no_time_passed(tmp_path):
    load = Load(5.0, 1.0, 3.0, 0.25, 2)
    assert load.others_since(load) == 0.25


def test_this_machine():
    before = processor_load()
    sum(range(10**6))
    after = processor_load()
    assert after.own_s > before.own_s and after.others_since(before) >= 0
