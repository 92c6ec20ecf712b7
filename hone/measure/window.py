"""A measurement window around a piece of work: its time, peak memory and energy."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from hone.base.artifact import Draft
from hone.base.figure import Figure
from hone.base.run import Run
from hone.measure import trace as traces
from hone.measure.energy import SHORT_S, Meter
from hone.measure.machine import describe
from hone.measure.memory import PeakMeter
from hone.measure.trace import Recorder


class Window:
    """Measures the work inside `with Window(device) as window:`.

    Windows may be nested. On a CPU memory is the resident memory of the process, mapped files included; on a GPU it is
    torch's allocated memory, and both ends wait for the device to finish. `trace`: file of a power trace to record meanwhile.
    """

    def __init__(self, device: str = "cpu", trace: Path | None = None) -> None:
        self.device = str(device)
        self._recorder = None if trace is None else Recorder(self.device, trace)
        self.time_s = 0.0
        self.energy_j: float | None = None
        self.energy_note = ""
        self._memory = PeakMeter(self.device)

    def __enter__(self) -> Self:
        self._wait()
        self._meter = Meter(self.device)
        self._memory.open()
        self._meter.start()
        self.energy_note = self._meter.note
        if self._recorder is not None:
            self._recorder.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self._wait()
        finally:
            self.time_s = time.perf_counter() - self._begun
            self.energy_j = self._meter.joules()
            self._meter.stop()
            self._memory.close()
            if self._recorder is not None:
                self._recorder.stop()
            if self.energy_j == 0:
                self.energy_j, self.energy_note = (
                    None,
                    f"{self.energy_note}; its counter did not move in {self.time_s:.3f} s",
                )
            elif self.energy_j is not None and self.time_s < SHORT_S:
                self.energy_note += f"; uncertain: shorter than {SHORT_S:g} s, and counters move every 10 to 100 ms"

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
        """time_s, peak_memory_bytes, memory_growth_bytes, energy_j (None, with the reason, without a sensor).

        With a sensor and the power at rest of this machine's calibration also energy_above_idle_j; with a trace its mean and peak power.
        """
        where = "allocated on the GPU" if self.device.startswith("cuda") else "resident, whole process"
        found = [
            Figure(name="time_s", value=self.time_s, unit="s"),
            Figure(name="peak_memory_bytes", value=self.peak_memory_bytes, unit="B", note=where),
            Figure(name="memory_growth_bytes", value=self.memory_growth_bytes, unit="B", note=where),
            Figure(name="energy_j", value=self.energy_j, unit="J", note=self.energy_note),
        ]
        idle_w = idle_watts(self.device) if self.energy_j is not None else None
        if self.energy_j is not None and idle_w is not None:
            note = f"above the {idle_w:.0f} W at rest when this machine was calibrated"
            found.append(
                Figure(name="energy_above_idle_j", value=self.energy_j - idle_w * self.time_s, unit="J", note=note)
            )
        if self._recorder is not None:
            found += self._traced(self._recorder)
        return found

    @staticmethod
    def _traced(recorder: Recorder) -> list[Figure]:
        if not recorder.path.exists():
            return [Figure(name="power_peak_w", value=None, unit="W", note=recorder.note)]
        return traces.figures(traces.read_trace(recorder.path), note=f"{recorder.path.name} in log/")

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self.device)


def idle_watts(device: str) -> float | None:
    """Watts of `device` at rest, as this machine was calibrated; None: not measured."""
    calibration = describe(device).calibration
    return None if calibration is None else calibration.idle_watts


def power_trace(run: Run, draft: Draft) -> Path | None:
    """The file of the power trace of a stage, where `run` asks for one."""
    return draft.log / "power.csv" if run.power_trace else None


def record_energy_per(draft: Draft, name: str, count: float, unit: str) -> None:
    """Records `name`, the stage's joules divided by `count` of `unit`; None with the reason where no joules were measured."""
    energy = draft.figures["energy_j"]
    value = energy.value / count if energy.value is not None and count else None
    draft.record(name, value, f"J/{unit}", note=energy.note)
