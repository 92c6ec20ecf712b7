"""The C interface of NVML, against a library made up: which calls are made with which arguments, and how refusals come back."""

from __future__ import annotations

import ctypes

import pytest

from hone.measure.clocks.nvml import NvmlError, NvmlGpu, _Field


class Library:
    """Functions by NVML's names, which write through the pointers that they are given; codes of refusals by name."""

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.set: dict[str, tuple] = {}
        self.mig = 0

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if self.refused.get(name) == -1:  # a driver without the call
            raise AttributeError(name)
        return lambda *arguments: self.refused.get(name, 0) or self._call(name, arguments)

    def _call(self, name: str, arguments: tuple) -> int:
        if name == "nvmlDeviceGetFieldValues":
            field = arguments[2]._obj
            assert field.field == 186 and ctypes.sizeof(_Field) == 40 and _Field.value.offset == 32
            field.value.uint, field.code = 512_250, 0
        elif name == "nvmlDeviceGetPowerManagementLimitConstraints":
            arguments[1]._obj.value, arguments[2]._obj.value = 200_000, 700_000
        elif name == "nvmlDeviceGetSupportedMemoryClocks":
            arguments[1]._obj.value = 2
            arguments[2][0], arguments[2][1] = 1593, 2619
        elif name == "nvmlDeviceGetSupportedGraphicsClocks":
            assert arguments[1].value == 2619
            arguments[2]._obj.value = 3
            for place, mhz in enumerate((345, 1980, 1200)):
                arguments[3][place] = mhz
        elif name == "nvmlDeviceGetMigMode":
            arguments[1]._obj.value = self.mig
        elif name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
            self.set[name] = tuple(one.value for one in arguments[1:])
        elif name in READ:
            arguments[-1]._obj.value = READ[name]
        elif name == "nvmlDeviceGetUtilizationRates":
            arguments[1]._obj.gpu = 87
        else:
            assert name in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID"), name
        return 0


READ = {
    "nvmlDeviceGetTotalEnergyConsumption": 2**40 + 5,
    "nvmlDeviceGetPowerUsage": 400_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
    "nvmlDeviceGetPowerManagementLimit": 650_000,
}


def test_it_reads_in_its_units():
    gpu = NvmlGpu("GPU-1", Library())
    assert gpu.energy_mj() == 2**40 + 5  # more than 32 bits
    assert gpu.power_w() == 512.25 and gpu.temperature_c() == 61.0 and gpu.utilization() == 0.87
    assert gpu.clocks_mhz() == (1755, 1755) and gpu.throttle() == 0x24
    assert gpu.supported_mhz() == (1980, 1200, 345) and gpu.limits_w() == (200.0, 700.0, 650.0)
    assert not gpu.divided


@pytest.mark.parametrize("code", [3, -1])
def test_the_older_power_where_there_is_no_newer_one(code):
    gpu = NvmlGpu("GPU-1", Library(nvmlDeviceGetFieldValues=code))
    assert gpu.power_w() == gpu.power_w() == 400.0


def test_it_sets_both_ends_of_the_clock_and_milliwatts():
    library = Library()
    gpu = NvmlGpu("GPU-1", library)
    gpu.lock_clocks(1200)
    gpu.set_limit_w(450.5)
    gpu.reset_clocks()
    assert library.set == {
        "nvmlDeviceSetGpuLockedClocks": (1200, 1200),
        "nvmlDeviceSetPowerManagementLimit": (450_500,),
        "nvmlDeviceResetGpuLockedClocks": (),
    }


def test_refusals_name_the_call_and_the_reason():
    gpu = NvmlGpu("GPU-1", Library(nvmlDeviceSetGpuLockedClocks=4, nvmlDeviceGetTemperature=15))
    with pytest.raises(NvmlError, match="nvmlDeviceSetGpuLockedClocks: not permitted to this user") as caught:
        gpu.lock_clocks(1200)
    assert caught.value.refused
    with pytest.raises(NvmlError, match="error 15") as caught:
        gpu.temperature_c()
    assert not caught.value.refused  # the device is lost
    with pytest.raises(NvmlError, match="nvmlInit_v2"):
        NvmlGpu("GPU-1", Library(nvmlInit_v2=9))


def test_a_device_divided_by_mig_is_known():
    library = Library()
    library.mig = 1
    assert NvmlGpu("GPU-1", library).divided
    assert not NvmlGpu("GPU-1", Library(nvmlDeviceGetMigMode=3)).divided
