"""Schedules against their closed forms, and at their ends."""

from __future__ import annotations

import math

import pytest

from hone.base.errors import SpecError
from hone.train import SCHEDULES
from hone.train.schedules.cosine import Cosine
from hone.train.schedules.wsd import WarmupStableDecay


def test_cosine_closed_form():
    schedule = Cosine(warmup=10, floor=0.1)
    steps = 110
    assert [schedule.share(step, steps) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    for step in range(10, steps):
        t = (step - 10) / 99
        assert schedule.share(step, steps) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2, abs=1e-12)
    assert schedule.share(steps - 1, steps) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", ["linear", "sqrt", "exponential"])
def test_wsd_closed_form(shape):
    schedule = WarmupStableDecay(warmup=5, decay=20, floor=0.05, shape=shape)
    shares = [schedule.share(step, 100) for step in range(100)]
    assert shares[5:80] == [1.0] * 75
    for step in range(80, 100):
        t = (step - 79) / 20
        expected = {"linear": 1 - 0.95 * t, "sqrt": 1 - 0.95 * math.sqrt(t), "exponential": 0.05**t}[shape]
        assert shares[step] == pytest.approx(expected, abs=1e-12)
    assert shares[-1] == pytest.approx(0.05)


def test_a_value_below_one_is_a_share_of_all_steps():
    assert WarmupStableDecay(warmup=0.1, decay=0.5).share(99, 1000) == 1.0
    assert WarmupStableDecay(warmup=0.1, decay=0.5).share(98, 1000) == pytest.approx(0.99)
    assert WarmupStableDecay(warmup=0.1, decay=0.5).share(500, 1000) < 1.0
    assert WarmupStableDecay(warmup=0.1, decay=0.5).share(499, 1000) == 1.0


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_every_schedule_lives_with_few_steps(name, steps):
    schedule = SCHEDULES.read(name)
    shares = [schedule.share(step, steps) for step in range(steps)]
    assert all(0 <= share <= 1 for share in shares)


def test_a_warmup_longer_than_the_training_is_said():
    with pytest.raises(SpecError, match="longer than the training of 10 steps"):
        Cosine(warmup=11).share(0, 10)
