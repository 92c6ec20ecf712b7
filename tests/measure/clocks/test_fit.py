"""The model of time and power by clock: recovers its own parameters, and describes sweeps that others measured."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import curve_fit

from hone.base.errors import SpecError
from hone.measure.clocks.fit import ClockModel, Point, fit, modelled, spread
from tests.measure.clocks.perseus import A100_FORWARD
from tests.measure.clocks.plant import Plant

CLOCKS = [1980, 1755, 1530, 1305, 1080, 900, 700, 500, 345]


@pytest.mark.parametrize("exponent", [2.0, 3.0])
@pytest.mark.parametrize("knee", [0.0, 1200.0])
def test_it_finds_the_parameters_that_made_the_points(exponent, knee):
    true = ClockModel(1980.0, 0.6, 0.4, 80.0, 500.0, exponent, knee)
    found = fit([true.point(mhz) for mhz in range(500, 1981, 40)], idle_w=80.0)
    assert found.memory_s == pytest.approx(0.6, rel=1e-3) and found.compute_s == pytest.approx(0.4, rel=1e-3)
    assert found.exponent == pytest.approx(exponent, rel=0.02) and found.dynamic_w == pytest.approx(500.0, rel=1e-2)
    for mhz in (600, 1190, 1700):
        assert found.energy_j(mhz) == pytest.approx(true.energy_j(mhz), rel=1e-2)


def test_scipys_own_fit_of_the_curve_agrees():
    true = ClockModel(1980.0, 0.6, 0.4, 80.0, 500.0, 2.6)
    points = [true.point(mhz) for mhz in range(500, 1981, 40)]
    powers, clocks = [one.power_w for one in points], np.array([one.mhz for one in points]) / 1980
    (idle, dynamic, exponent), _ = curve_fit(lambda x, a, c, k: a + c * x**k, clocks, powers, p0=[50, 400, 2])
    found = fit(points)
    assert found.power_w(1000) == pytest.approx(idle + dynamic * (1000 / 1980) ** exponent, rel=1e-3)


def test_a_published_sweep_of_an_a100_is_u_shaped_and_its_optimum_is_found():
    """The least energy of the 38 clocks that were measured is 17.51 J at 1080 MHz, 26 % below that at 1410, for 24 % more time."""
    found = fit(A100_FORWARD)
    measured = min(A100_FORWARD, key=lambda one: one.energy_j)
    assert measured.mhz == 1080
    assert all(found.energy_j(one.mhz) == pytest.approx(one.energy_j, rel=0.04) for one in A100_FORWARD)
    assert all(found.time_s(one.mhz) == pytest.approx(one.time_s, rel=0.04) for one in A100_FORWARD)
    best = min((one.mhz for one in A100_FORWARD), key=found.energy_j)
    taken = next(one for one in A100_FORWARD if one.mhz == best)
    assert taken.energy_j < 1.03 * measured.energy_j and 900 <= best <= 1140
    assert found.energy_j(300) > found.energy_j(best) < found.energy_j(1410)


def test_five_of_the_published_settings_predict_the_others():
    few = [one for one in A100_FORWARD if one.mhz in (1410, 1275, 1140, 1005, 870)]
    found = fit(few)
    for one in A100_FORWARD:
        assert found.energy_j(one.mhz) == pytest.approx(one.energy_j, rel=0.06)


def test_a_sweep_of_the_plant_is_fitted_from_measurements():
    points = []
    for mhz in CLOCKS:
        gpu = Plant(locked=mhz, leak=0.0)
        units = gpu.run(20.0, memory_s=0.006, compute_s=0.004)
        points.append(Point(mhz, 20.0 / units, gpu.joules / units))
    found = fit(points)
    assert found.memory_s == pytest.approx(0.006, rel=0.01) and found.compute_s == pytest.approx(0.004, rel=0.01)
    assert found.power_w(1500) == pytest.approx(75 + 625 * (1500 / 1980) ** 3, rel=0.01)


def test_memory_bound_work_saves_more_at_a_low_clock():
    """What waits for memory loses little time: with everything else equal, its best clock is lower and saves more."""
    decode = modelled(0.010, 500.0, 80.0, compute_share=0.05, full_mhz=1980)
    train = modelled(0.010, 500.0, 80.0, compute_share=0.95, full_mhz=1980)
    assert min(CLOCKS, key=decode.energy_j) < min(CLOCKS, key=train.energy_j)
    saved = [1 - min(map(one.energy_j, CLOCKS)) / one.energy_j(1980) for one in (decode, train)]
    assert saved[0] > saved[1] > 0
    assert decode.point(1980) == Point(1980, pytest.approx(0.010), pytest.approx(5.0))


def test_too_few_clocks_are_refused():
    points = [Point(mhz, 1.0, 100.0) for mhz in (1000, 1000, 1100, 1200, 1300)]
    with pytest.raises(SpecError, match="needs 5 different ones, got 4"):
        fit(points)
    assert spread(Plant().supported_mhz(), 5) == [1980, 1710, 1440, 1170, 900]
    with pytest.raises(SpecError, match="offers 2 clocks"):
        spread((1500, 1000), 5)
