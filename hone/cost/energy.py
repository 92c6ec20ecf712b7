"""Joules of a piece of work: its seconds at the power that this machine drew while it was calibrated."""

from __future__ import annotations

from hone.base.figure import Estimate
from hone.measure.machine import Machine


def with_energy(estimates: dict[str, Estimate], machine: Machine) -> dict[str, Estimate]:
    """`estimates` and, where the machine has a sensor and a time is among them, `energy_j`.

    The power is the mean of the calibration's products, copies and starts of operations. Work that waits for memory draws
    less than products do (an H200 decodes at 137 to 300 W and multiplies at up to 700), so no tolerance is promised.
    """
    time_s, calibration = estimates.get("time_s"), machine.calibration
    if time_s is None or time_s.bound or calibration is None or calibration.watts is None:
        return estimates
    formula = f"{time_s.value:.3g} s x {calibration.watts:.0f} W, the power while {calibration.device} was calibrated"
    return {**estimates, "energy_j": Estimate(value=time_s.value * calibration.watts, unit="J", formula=formula)}
