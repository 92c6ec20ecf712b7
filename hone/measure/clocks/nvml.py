"""One NVIDIA GPU as NVML shows it: energy, power, temperature, clocks and their limits, and the calls that lock them."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

LIBRARY = "libnvidia-ml.so.1"
IDLE, POWER_CAP, THERMAL = 0x1, 0x4 | 0x80, 0x20 | 0x40
"""Bits of `Gpu.throttle`: nothing to do; the power limit or the power brake; too hot, as the driver or the hardware says."""
_INVALID, _NOT_SUPPORTED, _NO_PERMISSION = 2, 3, 4
_SM, _MEM = 1, 2
_POWER_INSTANT = 186
"""NVML's field of the power now. The older call gives a mean over the last second on Ampere and later."""
_WORDS = {
    _INVALID: "not a value of this device",
    _NOT_SUPPORTED: "not supported by this device",
    _NO_PERMISSION: "not permitted to this user",
}


class NvmlError(OSError):
    """A call that NVML refused; `code` is its number."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {_WORDS.get(code, 'failed')} (NVML error {code})")
        self.code = code

    @property
    def invalid(self) -> bool:
        """Whether the device has no such value."""
        return self.code == _INVALID

    @property
    def refused(self) -> bool:
        """Whether it needs rights that this user has not, or is not there to be set on this device."""
        return self.code in (_NOT_SUPPORTED, _NO_PERMISSION)


class Gpu(Protocol):
    """What is read of a GPU and set on it. Every method raises NvmlError where the device or the driver refuses."""

    @property
    def uuid(self) -> str:
        """Identifier of the device, 'GPU-...'."""
        ...

    def energy_mj(self) -> int:
        """Millijoules since the driver was loaded; Volta and later."""
        ...

    def power_w(self) -> float:
        """Watts now."""
        ...

    def temperature_c(self) -> float:
        """Degrees Celsius of the chip."""
        ...

    def clocks_mhz(self) -> tuple[int, int]:
        """Clocks now: of the multiprocessors and of the memory."""
        ...

    def utilization(self) -> float:
        """Share of the last moments in which a kernel ran, 0..1."""
        ...

    def throttle(self) -> int:
        """Bits that say why the clock is not higher; see `IDLE`, `POWER_CAP` and `THERMAL`."""
        ...

    def supported_mhz(self) -> tuple[int, ...]:
        """The graphics clocks that can be locked, highest first."""
        ...

    def limits_w(self) -> tuple[float, float, float]:
        """Power limits: the least, the most, and the one set now."""
        ...

    def lock_clocks(self, mhz: int) -> None:
        """Locks the graphics clock."""
        ...

    def reset_clocks(self) -> None:
        """Ends the lock."""
        ...

    def set_limit_w(self, watts: float) -> None:
        """Sets the power limit."""
        ...


class _Value(ctypes.Union):
    _fields_ = [("double", ctypes.c_double), ("uint", ctypes.c_uint), ("ull", ctypes.c_ulonglong)]


class _Field(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latency_us", ctypes.c_int64),
        ("kind", ctypes.c_uint32),
        ("code", ctypes.c_uint32),
        ("value", _Value),
    ]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class NvmlGpu:
    """A `Gpu` through the driver's own library, which is called by its C interface: no package is needed."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self.uuid = uuid
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._handle = ctypes.c_void_p()
        self._check("nvmlInit_v2")
        self._check("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self._instant = True

    def _check(self, call: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, call)
        except AttributeError:  # a driver older than the call
            raise NvmlError(call, _NOT_SUPPORTED) from None
        code = function(*arguments)
        if code != 0:
            raise NvmlError(call, code)

    def _uint(self, call: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self._check(call, self._handle, *arguments, ctypes.byref(value))
        return value.value

    @property
    def divided(self) -> bool:
        """Whether the device is divided by MIG: its parts have no reading of their own."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._check("nvmlDeviceGetMigMode", self._handle, ctypes.byref(now), ctypes.byref(pending))
        except NvmlError:  # a device that cannot be divided
            return False
        return now.value == 1

    def energy_mj(self) -> int:
        value = ctypes.c_ulonglong()
        self._check("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value

    def power_w(self) -> float:
        if self._instant:
            field = _Field(field=_POWER_INSTANT)
            try:
                self._check("nvmlDeviceGetFieldValues", self._handle, 1, ctypes.byref(field))
            except NvmlError:
                field.code = _NOT_SUPPORTED
            if field.code == 0:
                return field.value.uint / 1e3
            self._instant = False
        return self._uint("nvmlDeviceGetPowerUsage") / 1e3

    def temperature_c(self) -> float:
        return float(self._uint("nvmlDeviceGetTemperature", 0))

    def clocks_mhz(self) -> tuple[int, int]:
        return self._uint("nvmlDeviceGetClockInfo", _SM), self._uint("nvmlDeviceGetClockInfo", _MEM)

    def utilization(self) -> float:
        found = _Utilization()
        self._check("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(found))
        return found.gpu / 100

    def throttle(self) -> int:
        value = ctypes.c_ulonglong()
        self._check("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, ctypes.byref(value))
        return value.value

    def supported_mhz(self) -> tuple[int, ...]:
        memory = self._list("nvmlDeviceGetSupportedMemoryClocks")
        return self._list("nvmlDeviceGetSupportedGraphicsClocks", ctypes.c_uint(max(memory)))

    def _list(self, call: str, *arguments: Any) -> tuple[int, ...]:
        count = ctypes.c_uint(1024)
        found = (ctypes.c_uint * count.value)()
        self._check(call, self._handle, *arguments, ctypes.byref(count), found)
        return tuple(sorted(found[: count.value], reverse=True))

    def limits_w(self) -> tuple[float, float, float]:
        least, most = ctypes.c_uint(), ctypes.c_uint()
        call = "nvmlDeviceGetPowerManagementLimitConstraints"
        self._check(call, self._handle, ctypes.byref(least), ctypes.byref(most))
        return least.value / 1e3, most.value / 1e3, self._uint("nvmlDeviceGetPowerManagementLimit") / 1e3

    def lock_clocks(self, mhz: int) -> None:
        self._check("nvmlDeviceSetGpuLockedClocks", self._handle, ctypes.c_uint(mhz), ctypes.c_uint(mhz))

    def reset_clocks(self) -> None:
        self._check("nvmlDeviceResetGpuLockedClocks", self._handle)

    def set_limit_w(self, watts: float) -> None:
        self._check("nvmlDeviceSetPowerManagementLimit", self._handle, ctypes.c_uint(round(watts * 1e3)))


def open_gpu(device: str) -> tuple[NvmlGpu | None, str]:
    """The GPU of CUDA device `device` and a note: its name, or why NVML does not show it.

    It is found by UUID, because NVML counts all GPUs and CUDA the visible ones alone.
    """
    import torch

    try:
        uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
        gpu = NvmlGpu(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        if uuid.startswith("MIG-") or gpu.divided:
            return None, "the GPU is divided by MIG, whose parts have no reading of their own"
    except (OSError, AttributeError) as error:
        return None, str(error)
    return gpu, f"NVML: {device}"
