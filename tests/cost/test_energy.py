"""Energy is said where the machine has a sensor and its rates are known, and only there."""

from __future__ import annotations

import pytest

from hone.base.figure import Estimate
from hone.cost.energy import with_energy
from hone.measure.machine import Machine
from tests.cost.h200 import h200

TIME = {"time_s": Estimate(value=3.0, unit="s", formula="work")}


def with_power(watts: float | None) -> Machine:
    machine = h200()
    calibration = machine.calibration.model_copy(update={"watts": watts})
    return machine.model_copy(update={"calibration": calibration})


def test_energy_is_time_at_the_calibrated_power():
    found = with_energy(TIME, with_power(500.0))["energy_j"]
    assert found.value == pytest.approx(1500) and found.unit == "J" and "500 W" in found.formula


@pytest.mark.parametrize(
    ("estimates", "machine"),
    [
        (TIME, with_power(None)),
        (TIME, h200().model_copy(update={"calibration": None})),
        ({}, with_power(500.0)),
        ({"time_s": TIME["time_s"].model_copy(update={"bound": True})}, with_power(500.0)),
    ],
)
def test_no_energy_is_made_up(estimates, machine):
    assert with_energy(estimates, machine) == estimates
