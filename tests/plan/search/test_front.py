"""The front: against brute force, with intervals, and with what is unknown."""

from __future__ import annotations

import numpy as np
import pytest

from hone.plan.search.front import chosen, front
from hone.plan.search.limits import Limit, Tally
from hone.plan.search.product import Lookup, Product


def brute(values: np.ndarray) -> list[bool]:
    """Which rows no other is at least as good as on all axes and better on one."""
    return [not any((other <= one).all() and (other < one).any() for other in values) for one in values]


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_exact_values_give_the_pareto_front(axes):
    values = np.random.default_rng(axes).uniform(1, 2, (60, axes))
    assert front(values, epsilon=0.0).tolist() == brute(values)


def test_what_overlaps_the_front_is_kept():
    values = np.array([[10.0, 10.0], [10.5, 10.5], [14.0, 14.0]])
    halves = 0.05 * values
    assert front(values).tolist() == [True, False, False]
    assert front(values, halves).tolist() == [True, True, False]


def test_differences_below_epsilon_do_not_count():
    values = np.array([[100.0, 1.0], [100.5, 1.0]])
    assert front(values).all() and not front(values, epsilon=0.001).all()


def test_unknown_is_neither_nothing_nor_better():
    known, unknown = [5.0, 1.0], [6.0, np.nan]
    assert front(np.array([known, unknown])).all()  # the second may be cheaper: nobody knows
    assert front(np.array([[5.0, np.nan], unknown])).tolist() == [True, False]  # unknown in both: hours decide


def test_rows_of_unknown_quality_are_compared_within_their_group_alone():
    values = np.array([[5.0, np.nan], [6.0, np.nan], [7.0, np.nan]])
    assert front(values, groups=["int4", "bf16", "bf16"]).tolist() == [True, True, False]


def test_the_choice_does_not_depend_on_units_and_leaves_unknown_out():
    values = np.array([[1.0, 8.0], [2.0, 3.0], [9.0, np.nan]])
    assert chosen(values, [1, 1]) == 1 and chosen(values * [3600, 100], [1, 1]) == 1
    assert chosen(values, [1, 0]) == 0
    assert chosen(np.array([[2.0, np.nan], [1.0, np.nan]]), [1, 1]) == 1
    assert chosen(np.zeros((0, 2)), [1, 1]) is None


def test_a_product_has_every_combination_once():
    product = Product({"a": (1, 2, 3), "b": ("x", "y")})
    (block,) = product.blocks()
    assert product.size == 6 and [tuple(product.at(block, row).values()) for row in range(6)] == [
        (a, b) for a in (1, 2, 3) for b in "xy"
    ]
    assert product.column(block, "a").tolist() == [1, 1, 2, 2, 3, 3]


def test_a_scalar_function_is_asked_once_for_each_combination_that_occurs():
    asked = []

    def function(one: int, two: int) -> tuple[float, float]:
        asked.append((one, two))
        return one + 10.0 * two, -1.0

    lookup = Lookup(function, 2)
    one, two = np.array([0, 2, 0, 2]), np.array([3, 1, 3, 1])
    first, second = lookup(one, two)
    assert first.tolist() == [30.0, 12.0, 30.0, 12.0] and second.tolist() == [-1.0] * 4
    lookup(one, two)
    assert sorted(asked) == [(0, 3), (2, 1)]


def test_rejected_rows_are_counted_by_the_first_limit_that_they_break():
    tally = Tally((Limit("memory", 10.0, "B"), Limit("deadline", 2.0, "h")))
    values = {"memory": np.array([5.0, 20.0, 30.0]), "deadline": np.array([3.0, 1.0, 9.0])}
    assert not tally.keep(values, lambda row: row).any()
    assert tally.rejected == {"breaks the limit of memory": 2, "breaks the limit of deadline": 1}
    nearest = {one.names: (one.values, one.row) for one in tally.binding()}
    assert nearest == {("deadline",): ((3.0,), 0), ("memory",): ((20.0,), 1)}


def test_limits_that_bind_together_are_told_together():
    tally = Tally((Limit("memory", 10.0, "B"), Limit("deadline", 2.0, "h")))
    tally.keep({"memory": np.array([15.0, 40.0]), "deadline": np.array([3.0, 2.5])}, lambda row: row)
    (broken,) = tally.binding()
    assert broken.names == ("memory", "deadline") and broken.row == 0


def test_an_unknown_amount_keeps_no_limit():
    tally = Tally((Limit("budget", 10.0, "$"),))
    assert not tally.keep({"budget": np.array([np.nan])}, lambda row: row).any()
    assert tally.binding() == []  # and nothing says what would have to be
