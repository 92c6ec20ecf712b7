"""A measurement window around a piece of work: its time, peak memory and energy."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from hone.base.figure import Figure
from hone.measure.energy import Meter
from hone.measure.memory import PeakMeter


class Window:
    """Measures the work inside `with Window(device) as window:`.

    Windows may be nested. On a CPU memory is the resident memory of the process, mapped files included; on a GPU it is
    torch's allocated memory, and both ends wait for the device to finish.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = str(device)
        self.time_s = 0.0
        self.energy_j: float | None = None
        self.energy_note = ""
        self._memory = PeakMeter(self.device)

    def __enter__(self) -> Self:
        self._wait()
        self._meter = Meter(self.device)
        self._memory.open()
        self._meter.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self._wait()
        finally:
            self.time_s = time.perf_counter() - self._begun
            self.energy_j = self._meter.joules()
            self.energy_note = self._meter.note
            self._meter.stop()
            self._memory.close()

    def joules(self) -> float | None:
        """Energy so far of a window that is open; None without a sensor."""
        return self._meter.joules()

    @property
    def start_memory_bytes(self) -> int:
        """Memory in use when the window opened."""
        return self._memory.start_bytes

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory in use during the window."""
        return self._memory.peak_bytes

    @property
    def memory_growth_bytes(self) -> int:
        """Peak memory minus the memory in use at the start."""
        return self.peak_memory_bytes - self.start_memory_bytes

    def figures(self) -> list[Figure]:
        """time_s, peak_memory_bytes, memory_growth_bytes, energy_j (None, with the reason, without a sensor)."""
        where = "allocated on the GPU" if self.device.startswith("cuda") else "resident, whole process"
        return [
            Figure(name="time_s", value=self.time_s, unit="s"),
            Figure(name="peak_memory_bytes", value=self.peak_memory_bytes, unit="B", note=where),
            Figure(name="memory_growth_bytes", value=self.memory_growth_bytes, unit="B", note=where),
            Figure(name="energy_j", value=self.energy_j, unit="J", note=self.energy_note),
        ]

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self.device)
