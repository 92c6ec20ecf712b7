"""Joules used by a device, from the counters of NVIDIA GPUs (NVML) and Intel or AMD processors (RAPL)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hone.measure.clocks.nvml import Gpu, open_gpu

_POWERCAP = Path("/sys/class/powercap")
_LOOK_S = 60.0  # a range of 262 kJ lasts 15 minutes at 300 W
RATE_HZ = 20.0
"""Readings a second of the power of a device that counts no energy; 10 is the least that follows a kernel's changes."""
SHORT_S = 1.0
"""Seconds below which a window's joules are said to be uncertain: counters move every 10 to 100 ms, and power sensors average."""


class Meter:
    """Energy of one device since `start`. Without a readable counter `joules()` is None; `note` names the counter or the reason."""

    def __init__(self, device: str = "cpu") -> None:
        self._counters: list[RaplCounter | NvmlCounter | PowerCounter] = []
        if device.startswith("cuda"):
            counter, self.note = gpu_counter(device)
            self._counters = [counter] if counter is not None else []
        else:
            counters, self.note = rapl_counters(_POWERCAP)
            self._counters = list(counters)
        self._seen: list[int] = []
        self._joules = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Starts counting. A RAPL counter wraps around after minutes and power is added up, so a thread reads them periodically."""
        self._seen = [counter.read() for counter in self._counters]
        every = _LOOK_S if any(isinstance(counter, RaplCounter) for counter in self._counters) else None
        every = 1 / RATE_HZ if any(isinstance(counter, PowerCounter) for counter in self._counters) else every
        if every is not None:
            threading.Thread(target=self._look, args=(every,), name="hone-energy", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        self._stopped.set()

    def joules(self) -> float | None:
        """Joules since `start`; None when there is no counter."""
        if not self._counters:
            return None
        with self._lock:
            now = [counter.read() for counter in self._counters]
            for counter, before, after in zip(self._counters, self._seen, now, strict=True):
                self._joules += counter.joules_between(before, after)
            self._seen = now
            return self._joules

    def _look(self, every: float) -> None:
        while not self._stopped.wait(every):
            self.joules()


def at_rest(device: str, seconds: float = 2.0, settle_s: float = 1.0) -> float | None:
    """Watts of `device` while this process does nothing, after `settle_s` of it; None without a sensor."""
    meter = Meter(device)
    meter.start()
    try:
        if meter.joules() is None:
            return None
        time.sleep(settle_s)
        before, begun = meter.joules() or 0.0, time.perf_counter()
        time.sleep(seconds)
        after, took = meter.joules() or 0.0, time.perf_counter() - begun
        return (after - before) / took if after > before else None
    finally:
        meter.stop()


class RaplCounter:
    """One package or DRAM domain of RAPL: microjoules that wrap around at `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self.name = (folder / "name").read_text(encoding="ascii").strip()
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self.read()

    def read(self) -> int:
        return int(self._file.read_text())

    def joules_between(self, before: int, after: int) -> float:
        return ((after - before) if after >= before else (after - before + self._range)) / 1e6


def rapl_counters(root: Path) -> tuple[list[RaplCounter], str]:
    """Counters of all packages and of DRAM beside them, and a note: their names, or why there are none.

    `core` and `uncore` are parts of a package and `psys` contains it; counting them too would count twice.
    """
    found, refused = [], False
    for folder in sorted(root.glob("intel-rapl*:*")):
        if folder.name.startswith("intel-rapl-mmio"):
            continue  # the same counters under another path
        try:
            counter = RaplCounter(folder)
        except PermissionError:
            refused = True
        except (OSError, ValueError):
            continue
        else:
            if counter.name.startswith("package") or counter.name == "dram":
                found.append(counter)
    if found:
        return found, "RAPL: " + ", ".join(counter.name for counter in found)
    if refused:
        return [], f"no energy: {root}/intel-rapl* is not readable for this user"
    return [], "no energy: this machine has no RAPL counter"


class NvmlCounter:
    """Total energy of one GPU since the driver was loaded, in millijoules (Volta and later)."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.read()

    def read(self) -> int:
        return self._gpu.energy_mj()

    def joules_between(self, before: int, after: int) -> float:
        return (after - before) / 1e3


class PowerCounter:
    """Microjoules of a GPU without a counter of energy: its power now, read `RATE_HZ` times a second and added up by a thread."""

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._clock, self._lock = gpu, clock, threading.Lock()
        self._total_j, self._at, self._power = 0.0, clock(), gpu.power_w()

    def read(self) -> int:
        """The sum so far, with the trapezoid since the last reading."""
        with self._lock:
            now, power = self._clock(), self._gpu.power_w()
            self._total_j += (now - self._at) * (power + self._power) / 2
            self._at, self._power = now, power
            return round(self._total_j * 1e6)

    def joules_between(self, before: int, after: int) -> float:
        return (after - before) / 1e6


def gpu_counter(device: str) -> tuple[NvmlCounter | PowerCounter | None, str]:
    """The energy counter of CUDA device `device` and a note: its name, or why there is none."""
    gpu, note = open_gpu(device)
    if gpu is None:
        return None, f"no energy: {note}"
    return counter_of(gpu, note)


def counter_of(
    gpu: Gpu, note: str, clock: Callable[[], float] = time.monotonic
) -> tuple[NvmlCounter | PowerCounter | None, str]:
    """The counter of `gpu`, its power added up where it has none, and `note` with how; None, with the reason, without both."""
    try:
        return NvmlCounter(gpu), note
    except OSError:
        pass
    try:
        return PowerCounter(gpu, clock), f"{note}, power read {RATE_HZ:g} times a second"
    except OSError as error:
        return None, f"no energy: {error}"
