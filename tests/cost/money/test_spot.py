"""Policies on spot machines: the deadline is met, foresight is the least, and files are read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import FitError, SpecError
from hone.cost.money.spot import (
    IDLE,
    ON_DEMAND,
    POLICIES,
    SPOT,
    SpotTrace,
    follow,
    foresight_usd,
    made_trace,
    read_trace,
)
from hone.cost.money.spot_sheet import SpotMoney


def hours(*up: int) -> SpotTrace:
    return SpotTrace(np.array(up, bool), 3600.0, "made")


@pytest.mark.parametrize("seed", range(6))
def test_every_policy_meets_the_deadline_and_none_beats_foresight(seed: int):
    trace = made_trace((0.2, 0.5, 0.9)[seed % 3], (1.0, 4.0)[seed % 2], 100, seed=seed)
    known = foresight_usd(trace, 48, 72, 0.25, 1.0, 3.0)
    for name, policy in POLICIES.items():
        spent = follow(policy, trace, 48, 72, 0.25)
        assert spent.end_h <= 72
        assert spent.spot_h + spent.on_demand_h == pytest.approx(48 + 0.25 * spent.changes), name
        assert spent.usd(1.0, 3.0) >= known - 1e-6, name
    always = follow(POLICIES["always on demand"], trace, 48, 72, 0.25)
    assert (always.on_demand_h, always.changes) == (48.25, 1)


def test_foresight_is_the_best_of_all_sequences():
    """All 3^7 sequences of machines over seven hours, with a change of one hour."""
    trace = hours(1, 0, 1, 1, 0, 1, 1)
    best = np.inf
    for plan in itertools.product((IDLE, SPOT, ON_DEMAND), repeat=7):
        left, usd, state = 3, 0.0, IDLE
        for tick, machine in enumerate(plan):
            if left == 0:
                break
            if machine == SPOT and not trace.up[tick]:
                left = 99
                break
            if machine != IDLE:
                left += machine != state
                usd += (0, 1.0, 2.5)[machine]
                left -= 1
            state = machine
        if left == 0:
            best = min(best, usd)
    assert foresight_usd(trace, 3, 7, 1, 1.0, 2.5) == pytest.approx(best)


def test_greedy_and_uniform_progress_differ_where_they_should():
    never = hours(*[0] * 40)
    greedy = follow(POLICIES["greedy spot"], never, 10, 30, 1)
    uniform = follow(POLICIES["uniform progress"], never, 10, 30, 1)
    assert greedy.changes == 1 and greedy.end_h >= 29  # it waits as long as it can
    assert uniform.on_demand_h > greedy.on_demand_h  # it keeps to the line, and pays for changes
    always = hours(*[1] * 40)
    assert follow(POLICIES["uniform progress"], always, 10, 30, 1).usd(1, 3) == 11


def test_recorded_traces_are_read(tmp_path: Path):
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 1, 1, 4, 0, 4]}))
    trace = read_trace(path)
    assert trace.availability == pytest.approx(4 / 6) and trace.mean_up_h == pytest.approx(4 / 2 / 6)
    assert read_trace(path, needed=4).availability == pytest.approx(2 / 6)
    path.write_text("[]")
    with pytest.raises(SpecError, match="is no trace of spot machines"):
        read_trace(path)
    with pytest.raises(FitError, match="do not fit into 5 h"):
        follow(POLICIES["greedy spot"], hours(1, 1), 5, 5, 1)
    with pytest.raises(SpecError, match="the trace has 2"):
        follow(POLICIES["greedy spot"], hours(1, 1), 1, 5, 1)


def test_a_made_trace_has_its_statistics():
    trace = made_trace(0.76, 5.7, 20_000, seed=4)
    assert trace.availability == pytest.approx(0.76, abs=0.02)
    assert trace.mean_up_h == pytest.approx(5.7, rel=0.05)


def test_the_sheet_has_all_policies():
    found = SpotMoney(
        work_h=24, deadline_h=40, usd_per_hour=3.06, spot_usd_per_hour=0.92, availability=0.76, mean_up_h=5.7
    ).sheet()
    assert found["always on demand"] == pytest.approx(24.1 * 3.06)
    assert found["perfect foresight saves"] >= max(found["greedy spot saves"], found["uniform progress saves"]) - 1e-9
    with pytest.raises(SpecError, match="give a trace, or availability"):
        SpotMoney.read({"work_h": 1, "deadline_h": 2, "usd_per_hour": 1, "spot_usd_per_hour": 1})
