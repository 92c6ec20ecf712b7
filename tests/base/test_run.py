"""Progress where no terminal is attached: plain lines, often enough, with what one wants to know; quiet stays quiet."""

from __future__ import annotations

import threading

import pytest

from hone.base import run as module
from hone.base.run import Lines, Run


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(total: float | None, unit: str = "") -> tuple[Lines, Clock, list[str]]:
    clock, said = Clock(), []
    bar = Lines("train", total, unit, clock=clock, write=said.append)
    bar._closed.wait = lambda seconds: True  # the thread that watches ends; the test's clock says when a line is due
    return bar, clock, said


def test_a_line_at_least_every_fifteen_seconds():
    bar, clock, said = lines(100)
    when = []
    for _ in range(100):
        clock.now += 2.5
        before = len(said)
        bar.advance(1, "loss 3.100")
        when += [clock.now] * (len(said) - before)
    gaps = [later - earlier for earlier, later in zip([100.0, *when], when)]
    assert max(gaps) <= 15 and len(when) >= 16
    assert said[0] == "train: 4 of 100 (4%)  loss 3.100  4 min 0 s left"


def test_a_slow_step_is_not_silent():
    bar, clock, said = lines(3)
    for second in range(31):
        clock.now = 100.0 + second
        bar.say_if_due()
    assert said == [f"train: 0 of 3 (0%)  {seconds} s so far" for seconds in (10, 20, 30)]


def test_the_watching_thread_says_it_without_any_step(monkeypatch):
    monkeypatch.setattr(module, "LINE_S", 0.5)
    said: list[str] = []
    spoken = threading.Event()
    bar = Lines("train", 10, write=lambda line: (said.append(line), spoken.set()))
    assert spoken.wait(300)
    bar.close()
    count = len(said)
    bar.say_if_due()
    assert len(said) == count, "it spoke after its end"


def test_what_an_earlier_run_did_is_no_part_of_the_rate():
    bar, clock, said = lines(1000, "B")
    bar.skip(900)
    clock.now += 10
    bar.advance(20)
    assert bar.rate == pytest.approx(2.0)
    assert said == ["train: 920 B of 1000 B (92%)  2 B/s  40 s left"]


def test_without_a_total():
    bar, clock, said = lines(None, "documents")
    clock.now += 12
    bar.advance(24)
    assert said == ["train: 24  2 documents/s"]


def test_a_run_without_a_terminal_speaks_and_a_quiet_one_does_not(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_S", 0.0)
    with Run().progress("tokenize", 10) as bar:
        bar.advance(5)
    assert "tokenize: 5 of 10 (50%)" in capsys.readouterr().err
    with Run(quiet=True).progress("tokenize", 10) as bar:
        bar.advance(5)
        bar.skip(1)
    assert capsys.readouterr().err == ""
