"""Prices of training and serving, returns, and the numbers of well-known guides: which add up and which do not."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.cli.dispatch import main
from hone.cost.money.roi import Return
from hone.cost.money.serving import ServingMoney
from hone.cost.money.training import TrainingMoney


def test_256_gpus_for_a_month_at_30_dollars():
    found = TrainingMoney(gpus=256, hours=720, usd_per_gpu_hour=30, people=10, usd_per_person_month=15_000, months=3, infrastructure_usd_per_month=40_000).sheet()  # fmt: skip
    assert found["hardware"] == 5_529_600
    assert found["all"] == 5_529_600 + 450_000 + 120_000  # $6.1M: people and infrastructure are $570k of it
    assert pytest.approx(0.475, abs=0.001) == 1 - 3.2 / 6.1  # "48 %"
    assert pytest.approx(0.876, abs=0.001) == 1 - 90 / 725  # "88 %"


def test_deepseek_v3_cost_5_576_million():
    """2.788M H800 hours at $2 (arXiv:2412.19437, table 1)."""
    assert TrainingMoney(gpus=2048, hours=2_788_000 / 2048, usd_per_gpu_hour=2).sheet()["hardware"] == pytest.approx(
        5.576e6
    )


def test_70b_on_5t_tokens_takes_240_days_and_not_two_weeks():
    """2.1e24 FLOP on 256 H100s (989 TFLOP/s) at 40 %: 240 days; two weeks buy 292B tokens."""
    spec = {"gpus": 256, "parameters": 70e9, "peak_tflops": 989.4, "mfu": 0.4, "usd_per_gpu_hour": 3}
    found = TrainingMoney(tokens=5e12, **spec).sheet()
    assert found["wall time"] / 24 == pytest.approx(240, abs=0.5)
    assert TrainingMoney(tokens=292e9, **spec).sheet()["wall time"] / 24 == pytest.approx(14, abs=0.05)
    assert found["of a million trained tokens"] == pytest.approx(found["all"] / 5e6)


def test_an_h200_serves_a_million_tokens_for_8_cents():
    """11,406 output tokens/s: $0.083 at $3.40 an hour, $0.029 on spot at $1.19, 0.061 J a token at 700 W."""
    found = ServingMoney(tokens_per_s=11_406, usd_per_gpu_hour=3.40, watts=700).sheet()
    assert found["a million tokens"] == pytest.approx(0.083, abs=0.0005)
    assert found["energy of a token, at this power and full rate"] == pytest.approx(0.0614, abs=0.0001)
    assert ServingMoney(tokens_per_s=11_406, usd_per_gpu_hour=1.19).sheet()["a million tokens"] == pytest.approx(
        0.029, abs=0.0005
    )
    half = ServingMoney(tokens_per_s=11_406, usd_per_gpu_hour=3.40, load=0.5).sheet()
    assert half["a million tokens"] == pytest.approx(2 * 0.0828, abs=0.001)


def test_replicas_stand_by_for_the_peak():
    found = ServingMoney(
        tokens_per_s=1000, gpus=2, usd_per_gpu_hour=3, average_tokens_per_s=900, peak_tokens_per_s=3500
    ).sheet()
    assert found["replicas"] == 4 and found["average load"] == pytest.approx(0.225)
    assert found["hardware, a year"] == 4 * 2 * 3 * 8760
    assert found["a million tokens"] == pytest.approx(4 * 2 * 3 / (900 * 3600) * 1e6)


def test_an_owned_gpu_costs_its_years_and_its_electricity():
    found = ServingMoney(
        tokens_per_s=1000, usd_per_gpu=35_000, watts=1000, life_years=4, pue=1.2, usd_per_kwh=0.1
    ).sheet()
    assert found["an hour of an owned GPU"] == pytest.approx(35_000 / 35_040 + 0.12)
    trained = TrainingMoney(gpus=8, hours=100, usd_per_gpu=35_000, watts=1000, use=0.5).sheet()
    assert trained["hardware"] == pytest.approx(800 * (35_000 / 17_520 + 0.12))


def test_the_guides_returns_do_not_follow_from_their_figures():
    """$200k saves $2.9M of training and $635k a year of serving: 1,668 % in the first year, and 218 % by serving alone.

    The guide says 300 %; its payback of serving alone would be 3.8 months.
    """
    both = Return(cost_usd=200_000, once_usd=2.9e6, monthly_usd=635_000 / 12)
    assert both.value() == pytest.approx(16.675, abs=0.001)
    assert any("paid back at once" in one for one in both.sheet().verdicts)
    serving = Return(cost_usd=200_000, monthly_usd=635_000 / 12).sheet()
    assert serving["return"] == pytest.approx(2.175, abs=0.001)
    assert serving["payback"] == pytest.approx(3.78, abs=0.01)


def test_swings_are_the_returns_at_both_ends():
    spec = Return(cost_usd=100.0, once_usd=50.0, monthly_usd=20.0, running_usd=5.0, months=12.0, vary=0.1)
    swings = {one.field: one for one in spec.swings()}
    assert spec.value() == pytest.approx((50 + 15 * 12 - 100) / 100)
    assert swings["monthly_usd"].high_return == pytest.approx((50 + 17 * 12 - 100) / 100)
    assert swings["cost_usd"].low_return == pytest.approx((230 - 90) / 90)
    order = [one.swing for one in spec.swings()]
    assert order == sorted(order, reverse=True) and len(order) == 5
    later = spec.model_copy(update={"discount": 0.1})
    assert later.value() == pytest.approx(later.sheet()["return"]) and later.value() < spec.value()


def test_the_commands_print_formulas_with_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", "money", "train", "--gpus=256", "--hours=720", "--usd_per_gpu_hour=30"]) == 0
    assert "256 \u00b7 720 \u00b7 30" in capsys.readouterr().out
    assert main(["cost", "money", "roi", "--cost_usd=200000", "--monthly_usd=52917"]) == 0
    assert "3.78 months" in capsys.readouterr().out
    assert main(["cost", "money", "serves"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["cost", "money", "train", "--gpus=8"]) == 2
    assert "give hours, or all of parameters" in capsys.readouterr().err
    with pytest.raises(SpecError, match="one of the two"):
        ServingMoney.read({"tokens_per_s": 5})
