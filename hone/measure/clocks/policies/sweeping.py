"""Policies that measure several settings of the running work, then keep the one that is best by a rule: max_slowdown and zeus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from hone.measure.clocks.fit import LEAST, ClockModel, spread
from hone.measure.clocks.held import FULL, Held, Setting
from hone.measure.clocks.policies.base import Clock, Governor, Phase, Tried


class Sweeping(Clock):
    """Measures the joules and seconds of a unit of work under `settings` settings, one after the other, while the work goes on."""

    never_waits: ClassVar[bool] = True

    knob: Literal["clock", "power_limit"] = Field(
        "clock", description="What is set: the graphics clock, or the power limit."
    )
    settings: int = Field(LEAST, ge=LEAST, description="Settings to measure, full clocks among them.")
    seconds: float = Field(10.0, ge=1, description="Seconds that each is measured; sensors need at least one.")
    settle_s: float = Field(3.0, ge=0, description="Seconds before that, until temperature and clock follow.")
    lowest: float = Field(0.45, gt=0, lt=1, description="Lowest setting, as a share of the highest.")

    def best(self, tried: Sequence[Tried], most_w: float) -> Tried:
        """The setting to keep; the first of `tried` is that of full clocks, `most_w` the device's highest power limit."""
        raise NotImplementedError

    def begin(self, held: Held, **more: Any) -> Governor:
        return Sweep(self, held, **more)

    def choices(self, held: Held) -> list[Setting]:
        """The settings to measure, full clocks first. Raises SpecError where the device offers fewer."""
        if self.knob == "clock":
            return [
                FULL,
                *(Setting(sm_mhz=mhz) for mhz in spread(held.gpu.supported_mhz(), self.settings, self.lowest)[1:]),
            ]
        least, most, _ = held.gpu.limits_w()
        low = max(least, self.lowest * most)
        steps = self.settings - 1
        return [FULL, *(Setting(limit_w=round(most - (most - low) * place / steps)) for place in range(1, steps + 1))]


class MaxSlowdown(Sweeping):
    """Keeps the setting of least energy that is slower than full clocks by at most a factor. Zeus' constraint, You et al. 2023, arXiv:2208.06102."""

    paper: ClassVar[str] = "arXiv:2208.06102"
    slowdown: float = Field(1.1, ge=1, description="Most seconds of a unit of work, of those at full clocks.")

    def best(self, tried: Sequence[Tried], most_w: float) -> Tried:
        within = [one for one in tried if one.time_s <= self.slowdown * tried[0].time_s]
        return min(within, key=lambda one: one.energy_j)


class Zeus(Sweeping):
    """Keeps the setting of least eta E + (1 - eta) P_max t: `eta` 1 saves energy alone, 0 time alone. You et al. 2023, arXiv:2208.06102."""

    paper: ClassVar[str] = "arXiv:2208.06102"
    eta: float = Field(0.5, ge=0, le=1, description="Weight of energy against time at the highest power limit.")

    def best(self, tried: Sequence[Tried], most_w: float) -> Tried:
        return min(tried, key=lambda one: self.eta * one.energy_j + (1 - self.eta) * most_w * one.time_s)


class Sweep(Governor):
    """Measures one setting after the other, then keeps the best."""

    def __init__(self, spec: Sweeping, held: Held, **more: Any) -> None:
        super().__init__(held, **more)
        self.spec = spec
        self._left = spec.choices(held)
        self._current = self._left.pop(0)
        self._since = self.now()
        self._from: tuple[float, int] | None = None
        self._done = 0.0
        self.ended = self._counter is None
        if self.ended:
            self.say(f"note: no clock is chosen: {self.note}")

    def decide(self, units: float, phase: Phase) -> None:
        if self.ended:
            return
        now = self.now()
        if self._from is None:
            if now - self._since >= self.spec.settle_s:
                self._from, self._done = (now, self._read()), 0.0
            return
        self._done += units
        begun, before = self._from
        if now - begun < self.spec.seconds or not self._done:
            return
        joules = self._joules(before)
        assert joules is not None, "ended without a counter"
        self.tried.append(Tried(self._current, (now - begun) / self._done, joules / self._done, self._done))
        self._from, self._since = None, now
        if not self._left:
            self._keep()
        elif self.set(self._left[0]):
            self._current = self._left.pop(0)
        else:
            self._begun = self.now(), self._read()

    def restart(self) -> None:
        super().restart()
        self._from, self._since = None, self.now()

    def _keep(self) -> None:
        self.ended = True
        best = self.spec.best(self.tried, self.held.gpu.limits_w()[1])
        full = self.tried[0]
        self.set(best.setting)
        saved, slower = 1 - best.energy_j / full.energy_j, best.time_s / full.time_s - 1
        self.say(
            f"clock: {best.setting} of {len(self.tried)} measured: {saved:.1%} less energy, {slower:+.1%} time a unit of work"
        )

    def chosen(self, model: ClockModel) -> float | None:
        if self.spec.knob != "clock":
            return None
        choices = spread(self.held.gpu.supported_mhz(), self.spec.settings, self.spec.lowest)
        tried = [Tried(Setting(sm_mhz=mhz), model.time_s(mhz), model.energy_j(mhz), 0.0) for mhz in choices]
        return self.spec.best(tried, self.held.gpu.limits_w()[1]).setting.sm_mhz
