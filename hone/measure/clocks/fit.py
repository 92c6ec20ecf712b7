"""Time and power of a piece of work by the graphics clock, fitted to a sweep: t(f) = t_mem + t_cmp f0 / f, P(f) = P_idle + c f^k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hone.base.errors import SpecError
from hone.base.lazy import lazy

np = lazy("numpy")  # policies are specs, which load without it

EXPONENTS = (1.0, 5.0)
"""Least and most exponent of power in the clock. Voltage rises with it, so dynamic power is f V^2: 1 below the knee where the voltage
has reached its floor, 2 to 3 above it."""
LEAST = 5
"""Settings that a fit or a choice needs: three parameters of power, and the ends where the clock no longer follows."""


class Point(NamedTuple):
    """A setting that was measured: seconds and joules of a unit of work at `mhz`."""

    mhz: float
    time_s: float
    energy_j: float

    @property
    def power_w(self) -> float:
        """Mean watts."""
        return self.energy_j / self.time_s


class ClockModel(NamedTuple):
    """A unit of work on one device. `full_mhz` is f0; `knee_mhz` the clock below which power falls only linearly."""

    full_mhz: float
    memory_s: float
    compute_s: float
    idle_w: float
    dynamic_w: float
    """Watts above idle at f0."""
    exponent: float
    knee_mhz: float = 0.0

    def time_s(self, mhz: float) -> float:
        """Seconds of a unit at `mhz`."""
        return self.memory_s + self.compute_s * self.full_mhz / mhz

    def power_w(self, mhz: float) -> float:
        """Watts at `mhz`: a voltage that has reached its floor at the knee does not fall further."""
        knee = min(self.knee_mhz, self.full_mhz)
        if mhz >= knee:
            return self.idle_w + self.dynamic_w * (mhz / self.full_mhz) ** self.exponent
        return self.idle_w + self.dynamic_w * (knee / self.full_mhz) ** self.exponent * mhz / knee

    def energy_j(self, mhz: float) -> float:
        """Joules of a unit at `mhz`."""
        return self.time_s(mhz) * self.power_w(mhz)

    def point(self, mhz: float) -> Point:
        """What the model expects of a measurement at `mhz`."""
        return Point(mhz, self.time_s(mhz), self.energy_j(mhz))


def fit(points: Sequence[Point], idle_w: float | None = None) -> ClockModel:
    """The model of least squares through `points`; with `idle_w` the power at rest is not fitted.

    Time is linear in (1, f0/f), solved without negative parts; power is fitted in relative error. Raises SpecError for fewer than
    `LEAST` different clocks.
    """
    from scipy.optimize import least_squares, nnls

    mhz = np.array([one.mhz for one in points], float)
    if len(set(mhz.tolist())) < LEAST:
        raise SpecError(
            f"a fit over clocks needs {LEAST} different ones, got {len(set(mhz.tolist()))}",
            fix="measure more settings: --clock.settings=5 or more",
        )
    full = float(mhz.max())
    times, watts = np.array([one.time_s for one in points]), np.array([one.power_w for one in points])
    parts, _ = nnls(np.stack([np.ones_like(mhz), full / mhz], 1) / times[:, None], np.ones_like(times))
    share = mhz / full
    top = float(watts.max())

    def wrong(found: Any) -> Any:
        idle, dynamic, exponent, knee = found if idle_w is None else (idle_w / top, *found)
        curve = np.where(share >= knee, share**exponent, knee ** (exponent - 1) * share)
        return (idle + dynamic * curve) * top / watts - 1

    least, most = [0.01, EXPONENTS[0], 0.05], [2.0, EXPONENTS[1], 1.0]
    begin = [[0.7, 2.5, knee] for knee in (0.1, 0.5, 0.75)]
    if idle_w is None:
        least, most, begin = [0.0, *least], [1.0, *most], [[0.2, *one] for one in begin]
    found = min((least_squares(wrong, one, bounds=(least, most)) for one in begin), key=lambda one: one.cost).x
    idle, dynamic, exponent, knee = found if idle_w is None else (idle_w / top, *found)
    return ClockModel(
        full,
        float(parts[0]),
        float(parts[1]),
        float(idle * top),
        float(dynamic * top),
        float(exponent),
        float(knee * full),
    )


def modelled(
    time_s: float, power_w: float, idle_w: float, compute_share: float, full_mhz: float, exponent: float = 2.5
) -> ClockModel:
    """The model of a unit of work that was measured at the full clock alone, where no other can be set.

    `compute_share`: the part of its seconds that follows the clock; `exponent` is between those of a voltage at its floor and above
    it. What follows is modelled, never measured, and an upper bound of what is saved: all power above rest is taken to follow the
    clock, also the memory's, which does not.
    """
    assert 0 <= compute_share <= 1 and power_w >= idle_w, "a share, and no less than at rest"
    compute = time_s * compute_share
    return ClockModel(full_mhz, time_s - compute, compute, idle_w, power_w - idle_w, exponent)


def spread(clocks: Sequence[int], count: int, lowest: float = 0.45) -> list[int]:
    """`count` of the supported `clocks`, evenly from the highest down to `lowest` of it, each at most once.

    Raises SpecError where the device has fewer.
    """
    usable = sorted({mhz for mhz in clocks if mhz >= lowest * max(clocks)}, reverse=True)
    if len(usable) < count:
        raise SpecError(
            f"the device offers {len(usable)} clocks from {lowest:.0%} of the highest up, fewer than {count}",
            fix="lower --clock.settings, or --clock.lowest",
        )
    places = [math.floor(place * (len(usable) - 1) / (count - 1) + 0.5) for place in range(count)]
    return [usable[place] for place in places]
