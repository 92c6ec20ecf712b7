"""How much of the communication of a trace passes beside computation: of steps between others, not of the last one."""

from __future__ import annotations

import pytest

from benchmarks.train_layouts import steady


def test_what_a_step_leaves_under_way_passes_beside_the_next_one():
    """Steps of 10 that compute for 8 of it, and gather for 3 from the end of their computation on: 1 beside the next one."""
    computing = [(10.0 * at, 10.0 * at + 8) for at in range(4)]
    moving = [(10.0 * at + 8, 10.0 * at + 11) for at in range(4)]
    assert steady([*moving[:-1], (38.0, 40.0)], computing, 4) == (pytest.approx(1 / 3), pytest.approx(0.8))
    inside = [(start + 2, end - 1) for start, end in computing]
    assert steady(inside, [*computing, (39.0, 40.0)], 4) == (1.0, pytest.approx(0.8))
    assert steady([(start + 8, start + 10) for start, _ in computing], computing, 4) == (0.0, pytest.approx(0.8))


def test_without_communication_there_is_no_share_of_it():
    assert steady([], [(0.0, 40.0)], 4) == (None, 1.0)
    assert steady([], [], 4) == (None, 0.0)
