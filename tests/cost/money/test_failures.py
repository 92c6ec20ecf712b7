"""Checkpoints against failures: published optima, simulation against the closed form, and recorded clusters."""

from __future__ import annotations

import numpy as np
import pytest

from hone.base.errors import SpecError
from hone.cost.money.checkpoints import Checkpoints
from hone.cost.money.failures import daly_s, efficiency, exponential, from_trace, simulate, young_s

LLAMA3_MTBF_S = 54 * 86400 / 419  # 16,384 H100s (arXiv:2407.21783): 3.09 h


@pytest.mark.parametrize(
    ("save", "restart", "young", "daly", "share"), [(30, 300, 817.4, 797.5, 0.904), (60, 600, 1155.9, 1116.3, 0.853)]
)
def test_llama_3_saves_every_13_minutes(save: float, restart: float, young: float, daly: float, share: float):
    assert pytest.approx(3.09, abs=0.005) == LLAMA3_MTBF_S / 3600
    assert young_s(save, LLAMA3_MTBF_S) == pytest.approx(young, abs=0.1)
    assert daly_s(save, LLAMA3_MTBF_S) == pytest.approx(daly, abs=0.1)
    assert efficiency(daly_s(save, LLAMA3_MTBF_S), save, restart, LLAMA3_MTBF_S) == pytest.approx(share, abs=0.0005)
    near = [efficiency(interval, save, restart, LLAMA3_MTBF_S) for interval in (0.5 * daly, daly, 2 * daly)]
    assert max(near) == near[1] and near[0] > 0.95 * near[1] and near[2] > 0.95 * near[1]  # the optimum is flat


def test_simulated_wall_time_agrees_with_dalys_formula():
    mtbf, work = 5000.0, 2e6
    times = exponential(mtbf, 4 * work, seed=1)
    run = simulate(work, 700, 40, 200, times)
    assert work / run.wall_s == pytest.approx(efficiency(700, 40, 200, mtbf), rel=0.02)
    assert run.failures == pytest.approx(run.wall_s / mtbf, rel=0.12)


def test_a_few_failures_by_hand():
    # work 100 with saves of 10 after 40: without failures 40 + 10 + 40 + 10 + 20
    assert simulate(100, 40, 10, 5, [1e9]) == (120.0, 0, 0.0)
    # at 95 it has 40 saved and 40 done, unsaved: those are lost
    assert simulate(100, 40, 10, 5, [95, 1e9]) == (95 + 5 + 40 + 10 + 20, 1, 40.0)
    # the restart fails at 97, too
    assert simulate(100, 40, 10, 5, [95, 97, 1e9]) == (97 + 5 + 40 + 10 + 20, 2, 40.0)
    with pytest.raises(SpecError, match="the failures end"):
        simulate(100, 40, 10, 5, [95])


def test_clusters_are_kept_and_cost_differently():
    """Bursts of failures among long quiet times, with the same mean: drawn in blocks they stay bursts."""
    draw = np.random.default_rng(0)
    gaps = np.concatenate([np.concatenate([draw.exponential(300, 9), [97_300]]) for _ in range(60)])
    drawn = np.diff(from_trace(gaps, 5e7, seed=2), prepend=0)
    lag = np.corrcoef(np.log(gaps[:-1]), np.log(gaps[1:]))[0, 1]
    assert np.corrcoef(np.log(drawn[:-1]), np.log(drawn[1:]))[0, 1] == pytest.approx(lag, abs=0.05)
    assert drawn.mean() == pytest.approx(gaps.mean(), rel=0.15)
    clustered = simulate(3e6, 700, 40, 200, from_trace(gaps, 2e7, seed=3))
    independent = simulate(3e6, 700, 40, 200, exponential(float(gaps.mean()), 2e7, seed=3))
    assert (
        clustered.wall_s < independent.wall_s
    )  # a second failure soon after the first finds less unsaved work to lose
    with pytest.raises(SpecError, match="too few or wrong"):
        from_trace([5.0], 100)


def test_the_sheet_prints_both_saves():
    found = Checkpoints(stall_s=3, usd_per_hour=49_152).sheet()
    assert found["time between failures of the job"] == pytest.approx(3.093, abs=0.001)
    assert found["interval (Daly)"] == pytest.approx(797.5, abs=0.5)
    assert found["share of time that is work"] == pytest.approx(0.904, abs=0.0005)
    assert found["asynchronous: share of time that is work"] > found["share of time that is work"]
    assert 0 < found["the asynchronous save is faster by"] < 0.1
    assert found["price of failures and saves"] == pytest.approx(49_152 * (found["wall time"] / 3600 - 1296))


def test_recorded_failures_are_played(tmp_path):
    """Gaps that are exponential give Daly's wall time; those of a record with bursts less, because a failure in a burst loses little."""
    draw = np.random.default_rng(5)
    (tmp_path / "even.txt").write_text("\n".join(f"{one:.6f}" for one in draw.exponential(3.0, 4000)))
    bursts = np.concatenate([np.concatenate([draw.exponential(0.05, 9), [29.55]]) for _ in range(400)])
    (tmp_path / "bursts.txt").write_text("\n".join(f"{one:.6f}" for one in bursts))
    middle = "wall time, 50 % of 51 jobs with recorded failures take less"
    even, clustered = (
        Checkpoints(failures=str(tmp_path / name), work_h=400).sheet() for name in ("even.txt", "bursts.txt")
    )
    assert even["time between failures of the job"] == pytest.approx(3.0, rel=0.05)
    assert even[middle] == pytest.approx(even["wall time"], rel=0.03)
    assert clustered[middle] < clustered["wall time"]
    for name, text in {
        "words": "often",
        "empty": "",
        "one": "3",
        "nan": "nan 5 6",
        "zero": "0 0",
        "less": "-1 5",
    }.items():
        (tmp_path / name).write_text(text)
    for name in ("words", "empty", "one", "nan", "zero", "less", "none"):
        with pytest.raises(SpecError, match=r"failures=.*(record of failures|cannot be read|are needed)"):
            Checkpoints(failures=str(tmp_path / name)).sheet()
