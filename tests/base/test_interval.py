"""Student's t and Welch's interval: the printed table, the density, scipy's test, and what must hold of any numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base.interval import Interval, half_width, ratio_half_width, t_quantile, welch

TABLE = {
    1: (3.078, 6.314, 12.706, 63.657),
    2: (1.886, 2.920, 4.303, 9.925),
    3: (1.638, 2.353, 3.182, 5.841),
    4: (1.533, 2.132, 2.776, 4.604),
    10: (1.372, 1.812, 2.228, 3.169),
    30: (1.310, 1.697, 2.042, 2.750),
    120: (1.289, 1.658, 1.980, 2.617),
    math.inf: (1.282, 1.645, 1.960, 2.576),
}
"""Quantiles .90, .95, .975, .995 by degrees of freedom, as statistics books print them."""
VALUES = st.lists(st.integers(-(10**6), 10**6).map(lambda value: value / 1000), min_size=2, max_size=6)


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_printed_table(freedom: float) -> None:
    for probability, value in zip((0.90, 0.95, 0.975, 0.995), TABLE[freedom], strict=True):
        assert t_quantile(probability, freedom) == pytest.approx(value, abs=5.1e-4)
        assert t_quantile(1 - probability, freedom) == pytest.approx(-value, abs=5.1e-4)


def test_quantiles_of_one_and_two_degrees_are_their_closed_forms() -> None:
    for probability in (0.5, 0.6, 0.9, 0.975, 0.9999):
        assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-10)
        both = 2 * probability - 1
        assert t_quantile(probability, 2) == pytest.approx(both * math.sqrt(2 / (1 - both**2)), rel=1e-10)


@given(st.floats(0.001, 0.999), st.floats(0.5, 1e5))
def test_the_density_integrated_to_a_quantile_is_its_probability(probability: float, freedom: float) -> None:
    quad = pytest.importorskip("scipy.integrate").quad
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = lambda x: math.exp(scale - (freedom + 1) / 2 * math.log1p(x * x / freedom))  # noqa: E731
    area, _ = quad(density, 0, t_quantile(probability, freedom), limit=200)
    assert 0.5 + area == pytest.approx(probability, abs=1e-7)


def test_welch_by_hand() -> None:
    # Variances 4 and 9, two values each: errors 2 and 4.5, freedom 6.5^2 / (2^2 + 4.5^2).
    found = welch([0.0, math.sqrt(8)], [10.0, 10 + math.sqrt(18)])
    assert found.by == pytest.approx(10 + math.sqrt(4.5) - math.sqrt(2))
    assert found.freedom == pytest.approx(6.5**2 / (4 + 4.5**2))
    assert found.half == pytest.approx(t_quantile(0.975, found.freedom) * math.sqrt(6.5))


@pytest.mark.filterwarnings("ignore:Precision loss")
@given(VALUES, VALUES)
def test_welch_is_that_of_scipy_and_mirrors(base: list[float], other: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats")
    found, back = welch(base, other), welch(other, base)
    assert found.by == -back.by and found.half == back.half
    if len(set(base)) > 1 or len(set(other)) > 1:
        interval = stats.ttest_ind(other, base, equal_var=False).confidence_interval()
        assert found.by - found.half == pytest.approx(interval.low, rel=1e-6, abs=1e-6)
        assert found.by + found.half == pytest.approx(interval.high, rel=1e-6, abs=1e-6)


def test_without_spread_the_interval_has_no_width() -> None:
    same, other = welch([2.0, 2.0], [2.0, 2.0, 2.0]), welch([2.0, 2.0], [3.0, 3.0])
    assert same == (0.0, 0.0, math.inf) and not same.clear
    assert other == (1.0, 0.0, math.inf) and other.clear


def test_tiny_spreads_keep_their_freedom() -> None:
    found = welch([0.0, 1e-160], [1e-160, 3e-160])
    assert found.freedom == pytest.approx(welch([0.0, 1.0], [1.0, 3.0]).freedom) and found.half >= 0


def test_the_interval_of_a_mean() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302652729911275 / math.sqrt(3))


@given(VALUES)
def test_groups_of_one_size_have_the_interval_of_their_means(means: list[float]) -> None:
    found = ratio_half_width([4 * mean for mean in means], [4] * len(means))
    assert found == pytest.approx(half_width(means), rel=1e-6, abs=1e-6)


def test_groups_of_other_sizes_on_paper() -> None:
    """(1 + 5) / (1 + 3) = 1.5; 2 / 1 (.5^2 + .5^2) = 1 of one degree of freedom, over 4."""
    assert ratio_half_width([1.0, 5.0], [1, 3]) == pytest.approx(12.706 / 4, abs=1e-3)
    assert ratio_half_width([7.0], [3]) is None


def test_an_interval_says_its_level_and_of_how_many() -> None:
    values = [1.0, 2.0, 4.0]
    usual, wide = Interval.of_mean(values), Interval.of_mean(values, level=0.99)
    assert usual is not None and wide is not None
    assert (usual.level, usual.n, wide.level) == (0.95, 3, 0.99) and wide.half_width > usual.half_width == half_width(
        values
    )
    assert wide.half_width / usual.half_width == pytest.approx(9.925 / 4.303, rel=1e-3)  # the printed table
    assert Interval.of_ratio(values, [1, 1, 1]) == usual
    assert Interval.of_mean([1.0]) is None and Interval.of_ratio([1.0], [2.0]) is None
