"""Fixed: one clock or power limit from the beginning to the end."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hone.base.errors import SpecError
from hone.measure.clocks.fit import ClockModel
from hone.measure.clocks.held import Held, Setting
from hone.measure.clocks.policies.base import Clock, Governor


class Fixed(Clock):
    """Locks the graphics clock, or sets a power limit, or both. Decoding loses 1 to 6 % of speed for up to 42 % of energy, arXiv:2501.08219."""

    paper = "arXiv:2501.08219"
    sm_mhz: int | None = Field(None, gt=0, description="Graphics clock to lock; empty: not locked.")
    power_limit_w: float | None = Field(None, gt=0, description="Power limit; empty: as it is.")

    def check(self) -> None:
        if self.sm_mhz is None and self.power_limit_w is None:
            raise SpecError("clock fixed sets nothing", fix="give --clock.sm_mhz=MHZ or --clock.power_limit_w=WATTS")

    @property
    def setting(self) -> Setting:
        """What it sets."""
        return Setting(self.sm_mhz, self.power_limit_w)

    def begin(self, held: Held, **more: Any) -> Governor:
        self.check()
        governor = _Fixed(held, **more)
        governor.wanted = self.setting
        governor.set(self.setting)
        return governor


class _Fixed(Governor):
    wanted: Setting

    def chosen(self, model: ClockModel) -> float | None:
        return self.wanted.sm_mhz
