"""A GPU made up for tests: its power follows the clock, its temperature follows the power, and it throttles when hot or at its limit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from hone.measure.clocks.nvml import NvmlError


@dataclass
class Plant:
    """P = idle + work c f^3 (with leakage by temperature), dT/dt = (P R - (T - ambient)) / tau, clocks in steps of 15 MHz.

    It implements `hone.measure.clocks.nvml.Gpu`. Time passes by `run(seconds)`, which returns what of `rate` units was done.
    """

    uuid: str = "GPU-plant"
    full_mhz: int = 1980
    idle_w: float = 75.0
    busy_w: float = 625.0
    """Watts above idle of full work at the full clock."""
    power: float = 3.0
    resistance: float = 0.06
    """Degrees a watt."""
    tau_s: float = 20.0
    ambient_c: float = 30.0
    leak: float = 0.002
    """Share by which power grows a degree above 60."""
    hot_c: float = 88.0
    default_w: float = 700.0
    permitted: bool = True
    counts: bool = True
    """Whether it has a counter of energy."""
    now_s: float = 0.0
    temp: float = 35.0
    locked: int | None = None
    limit: float | None = None
    work: float = 0.0
    """Share of the arithmetic units that work, 0: idle."""
    joules: float = 0.0
    calls: list[str] = field(default_factory=list)

    # what NVML shows

    def energy_mj(self) -> int:
        if not self.counts:
            raise NvmlError("nvmlDeviceGetTotalEnergyConsumption", 3)
        return int(self.joules * 1e3)

    def power_w(self) -> float:
        return self._power(self._clock())

    def temperature_c(self) -> float:
        return self.temp

    def clocks_mhz(self) -> tuple[int, int]:
        return self._clock(), 2619

    def utilization(self) -> float:
        return float(self.work > 0)

    def throttle(self) -> int:
        wanted = self.locked or self.full_mhz
        return (
            (0x20 if self.temp >= self.hot_c else 0)
            | (0x4 if self._capped(wanted) < wanted else 0)
            | (0 if self.work else 0x1)
        )

    def supported_mhz(self) -> tuple[int, ...]:
        return tuple(range(self.full_mhz, 194, -15))

    def limits_w(self) -> tuple[float, float, float]:
        return 200.0, self.default_w, self.limit or self.default_w

    def lock_clocks(self, mhz: int) -> None:
        self._may("nvmlDeviceSetGpuLockedClocks")
        self.calls.append(f"lock {mhz}")
        self.locked = mhz

    def reset_clocks(self) -> None:
        self._may("nvmlDeviceResetGpuLockedClocks")
        self.calls.append("reset")
        self.locked = None

    def set_limit_w(self, watts: float) -> None:
        self._may("nvmlDeviceSetPowerManagementLimit")
        self.calls.append(f"limit {watts:.0f}")
        self.limit = watts

    def _may(self, call: str) -> None:
        if not self.permitted:
            raise NvmlError(call, 4)

    # how it behaves

    def _power(self, mhz: int) -> float:
        warm = 1 + self.leak * max(self.temp - 60, 0)
        return self.idle_w * warm + self.work * self.busy_w * warm * (mhz / self.full_mhz) ** self.power

    def _capped(self, mhz: int) -> int:
        limit = self.limit or self.default_w
        while mhz > 210 and self._power(mhz) > limit:
            mhz -= 15
        return mhz

    def _clock(self) -> int:
        if not self.work:
            return self.locked or 345
        wanted = self.locked or self.full_mhz
        if self.temp >= self.hot_c:
            wanted = min(wanted, 1200)
        return self._capped(wanted)

    def run(self, seconds: float, memory_s: float = 0.0, compute_s: float = 1.0, work: float = 1.0) -> float:
        """Works for `seconds`; a unit takes `memory_s` + `compute_s` full / f. Returns the units that were done."""
        done, left = 0.0, seconds
        while left > 1e-9:
            each = min(left, 0.1)
            self.work = work
            mhz, watts = self._clock(), self.power_w()
            self.joules += watts * each
            self.temp += each * (watts * self.resistance - (self.temp - self.ambient_c)) / self.tau_s
            self.now_s += each
            done += each / (memory_s + compute_s * self.full_mhz / mhz)
            left -= each
        return done

    def rest(self, seconds: float) -> None:
        """Is idle for `seconds`."""
        self.run(seconds, work=0.0)
        self.work = 0.0


class FilePlant(Plant):
    """A plant whose lock and limit are in a file, so that they outlive the process that set them, as a GPU's do."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if path.exists():
            self.locked, self.limit = json.loads(path.read_text())

    def _keep(self) -> None:
        self.path.write_text(json.dumps([self.locked, self.limit]))

    def lock_clocks(self, mhz: int) -> None:
        super().lock_clocks(mhz)
        self._keep()

    def reset_clocks(self) -> None:
        super().reset_clocks()
        self._keep()

    def set_limit_w(self, watts: float) -> None:
        super().set_limit_w(watts)
        self._keep()
