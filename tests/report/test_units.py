"""Numbers in words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.report import units


@pytest.mark.parametrize(
    ("value", "unit", "name", "words"),
    [
        (1_310_000, "B", "", "1.25 MiB"),
        (512, "B", "", "512 B"),
        (1023.9 * 1024, "B", "", "1.00 MiB"),
        (78.3, "s", "", "78.3 s"),
        (0.0256, "s", "", "25.6 ms"),
        (4.1e-6, "s", "", "4.10 µs"),
        (226.4, "s", "", "3 min 46 s"),
        (7500, "s", "", "2 h 05 min"),
        (20919.9, "tokens/s", "", "20.9 k tokens/s"),
        (1_900_544, "parameters", "", "1.90 M parameters"),
        (4001, "documents", "", "4,001 documents"),
        (1, "documents", "", "1 document"),
        (0.413, "fraction", "", "41.3 %"),
        (0.413, "", "mfu", "41.3 %"),
        (5.8, "x", "", "5.80x"),
        (22.906, "", "", "22.9"),
        (0.0003, "nats/token", "", "0.000300 nats/token"),
        (0.0, "J", "", "0 J"),
        (0.000669, "J/token", "", "669 µJ/token"),
        (None, "J", "", "not measured"),
        (math.nan, "s", "", "not a number"),
    ],
)
def test_show(value: float | None, unit: str, name: str, words: str) -> None:
    assert units.show(value, unit, name) == words


@pytest.mark.parametrize(
    ("values", "unit", "words"),
    [
        ([0.5, 1.0, 1.5], "x", ["0.5x", "1x", "1.5x"]),
        ([0.3, 0.003], "fraction", ["30 %", "0.3 %"]),
        ([2.0**20, 2.0**21], "B", ["1 MiB", "2 MiB"]),
        ([1500.0, 0.005, 10.0], "", ["1,500", "0.005", "10"]),
        ([2194.9, 2195.1], "", ["2,194.9", "2,195.1"]),
        ([22.91, 22.92], "", ["22.91", "22.92"]),
    ],
)
def test_ticks_tell_values_apart(values: list[float], unit: str, words: list[str]) -> None:
    assert units.ticks(values, unit) == words


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.0092, "+0.92 %"),
        (0.035, "+3.5 %"),
        (-0.4, "-40 %"),
        (1.4, "+140 %"),
        (0.0000264, "0.00 %"),
        (0.0, "0.00 %"),
    ],
)
def test_signed_percent(ratio: float, words: str) -> None:
    assert units.signed_percent(ratio) == words


@given(st.floats(1e-9, 1e15))
def test_three_digits_are_right(value: float) -> None:
    read = float(units.three(value).replace(",", ""))
    assert math.isclose(read, value, rel_tol=0.0051)


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["B", "s", "J", "fraction", "x", "tokens", "tokens/s", ""]),
)
def test_every_number_has_words(value: float, unit: str) -> None:
    assert units.show(value, unit) and units.exact(value, unit) and units.ticks([value], unit)


@pytest.mark.parametrize(
    ("step", "value", "words"),
    [
        (0.138, -0.14389, "-0.144"),
        (12.44, 14008.26, "+14,008.3"),
        (2700.0, 3718.2, "+3,718"),
        (0.0, 2.0, "+2"),
        (1.0, -0.0001, "0.00"),
        (0.1 - 1e-17, 0.25, "+0.250"),
        (float("inf"), 1.0, "+1"),
    ],
)
def test_decimals_follow_the_deviation(step: float, value: float, words: str) -> None:
    assert units.fixed(value, units.decimals(step), signed=True) == words
