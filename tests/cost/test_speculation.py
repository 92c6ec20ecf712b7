"""The speed-up of guessing ahead, against the paper's closed form and a simulation."""

from __future__ import annotations

import random

import pytest

from hone.base.errors import SpecError
from hone.cost.serve.speculation import break_even, expected_tokens, speedup


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_rates_give_the_papers_sum(rate: float, count: int) -> None:
    assert expected_tokens([rate] * count) == pytest.approx((1 - rate ** (count + 1)) / (1 - rate))


def test_rates_that_fall_give_what_a_simulation_gives() -> None:
    rates, draw, tokens = (0.9, 0.6, 0.3), random.Random(0), 0
    for _ in range(20_000):
        tokens += 1
        for rate in rates:
            if draw.random() >= rate:
                break
            tokens += 1
    assert expected_tokens(rates) == pytest.approx(tokens / 20_000, abs=0.03)


def test_guesses_that_are_never_right_cost_their_time() -> None:
    assert speedup(expected_tokens([0.0] * 3), 2.0, 2.5, 0.5).value == pytest.approx(2 / 3)
    assert speedup(expected_tokens([1.0] * 3), 2.0, 2.0, 0.0).value == pytest.approx(4.0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_break_even_rate_brings_what_its_steps_cost(rate: float) -> None:
    tokens = (1 - rate**4) / (1 - rate)
    assert break_even(3, tokens - 0.2, 0.2, 1.0) == pytest.approx(rate)
    assert break_even(3, 2 * tokens, 0.0, 2.0) == pytest.approx(rate)


def test_steps_too_slow_never_pay_and_free_ones_always() -> None:
    assert break_even(3, 4.1, 0.0, 1.0) is None
    assert break_even(3, 1.0, 0.0, 1.0) == pytest.approx(0, abs=1e-6)


def test_what_is_no_chance_is_refused() -> None:
    with pytest.raises(SpecError, match="is no chance"):
        expected_tokens([0.5, 1.2])
