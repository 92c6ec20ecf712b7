"""Joules used by a device, from the counters of NVIDIA GPUs (NVML) and Intel or AMD processors (RAPL)."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
_LOOK_S = 60.0  # a range of 262 kJ lasts 15 minutes at 300 W
_NVML = "libnvidia-ml.so.1"


class Meter:
    """Energy of one device since `start`. Without a readable counter `joules()` is None; `note` names the counter or the reason."""

    def __init__(self, device: str = "cpu") -> None:
        self._counters: list[RaplCounter | NvmlCounter] = []
        if device.startswith("cuda"):
            counter, self.note = nvml_counter(device)
            self._counters = [counter] if counter is not None else []
        else:
            counters, self.note = rapl_counters(_POWERCAP)
            self._counters = list(counters)
        self._seen: list[int] = []
        self._joules = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Starts counting. A RAPL counter wraps around after minutes, so a thread reads it periodically."""
        self._seen = [counter.read() for counter in self._counters]
        if any(isinstance(counter, RaplCounter) for counter in self._counters):
            threading.Thread(target=self._look, name="hone-energy", daemon=True).start()

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

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self.joules()


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

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle
        self.read()

    def read(self) -> int:
        value = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value))
        if code != 0:
            raise OSError(f"NVML error {code}")
        return value.value

    def joules_between(self, before: int, after: int) -> float:
        return (after - before) / 1e3


def nvml_counter(device: str) -> tuple[NvmlCounter | None, str]:
    """The energy counter of CUDA device `device` and a note: its name, or why there is none.

    The GPU is found by UUID, because NVML counts all GPUs and CUDA only the visible ones.
    """
    import torch

    try:
        library = ctypes.CDLL(_NVML)
        if library.nvmlInit_v2() != 0:
            return None, "no energy: NVML does not start"
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if code != 0:
            return None, f"no energy: NVML does not know {uuid} (error {code})"
        return NvmlCounter(library, handle), f"NVML: {device}"
    except (OSError, AttributeError) as error:
        return None, f"no energy: {error}"
