"""Thermal: lowers the clock before a hot GPU throttles itself, and raises it again when it has cooled, with hysteresis."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from hone.measure.clocks.fit import ClockModel
from hone.measure.clocks.held import FULL, Held, Setting
from hone.measure.clocks.nvml import THERMAL
from hone.measure.clocks.policies.base import Clock, Governor, Phase


class Thermal(Clock):
    """Steps the clock down when the chip is hot, up when it is cool, by temperature, throttle bits and watts together. Uneven heat costs whole trainings time, arXiv:2509.10371.

    Never by temperature alone: a chip that is hot although it draws little has a cooling that a lower clock does not mend.
    """

    paper: ClassVar[str] = "arXiv:2509.10371"
    hot_c: float = Field(83.0, description="Temperature from which the clock is lowered.")
    cool_c: float = Field(76.0, description="Temperature up to which it is raised again.")
    busy_share: float = Field(
        0.3, gt=0, lt=1, description="Share of the power limit below which heat is not of this work."
    )
    step: float = Field(0.06, gt=0, lt=0.5, description="Share of the highest clock by which it is changed.")
    lowest: float = Field(0.4, gt=0, lt=1, description="Lowest clock, as a share of the highest.")
    interval_s: float = Field(5.0, gt=0, description="Seconds between changes: heat follows power slowly.")

    @model_validator(mode="after")
    def _has_a_band(self) -> Thermal:
        if self.cool_c >= self.hot_c:
            raise ValueError(f"cool_c {self.cool_c:g} is not below hot_c {self.hot_c:g}")
        return self

    def begin(self, held: Held, **more: Any) -> Governor:
        return ThermalGovernor(self, held, **more)


class ThermalGovernor(Governor):
    """Looks every `interval_s`."""

    def __init__(self, spec: Thermal, held: Held, **more: Any) -> None:
        super().__init__(held, **more)
        self.spec = spec
        self._clocks = sorted(held.gpu.supported_mhz())
        self._looked = self.now()
        self._warned = False

    def decide(self, units: float, phase: Phase) -> None:
        now, spec, gpu = self.now(), self.spec, self.held.gpu
        if now - self._looked < spec.interval_s:
            return
        self._looked = now
        celsius, watts, throttled = gpu.temperature_c(), gpu.power_w(), bool(gpu.throttle() & THERMAL)
        busy = watts >= spec.busy_share * gpu.limits_w()[2]
        top = self._clocks[-1]
        mhz = self.held.now.sm_mhz or top
        if busy and (throttled or celsius >= spec.hot_c):
            if throttled and self.held.now.sm_mhz is None:
                mhz = min(mhz, gpu.clocks_mhz()[0])  # where the device has put itself already
            self._move(max(mhz - spec.step * top, spec.lowest * top))
        elif not throttled and celsius <= spec.cool_c and self.held.now != FULL:
            self._move(mhz + spec.step * top)
        elif celsius >= spec.hot_c and not busy and not self._warned:
            self._warned = True
            self.say(
                f"note: the GPU is {celsius:.0f} C hot at {watts:.0f} W: its cooling, not this work; the clock stays"
            )

    def _move(self, mhz: float) -> None:
        near = min(self._clocks, key=lambda one: abs(one - mhz))
        self.set(FULL if near == self._clocks[-1] else Setting(sm_mhz=near))

    def chosen(self, model: ClockModel) -> float | None:
        return None
