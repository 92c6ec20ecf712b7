"""Description of this machine: processor, cores and memory that this process may use, GPUs, versions."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hone.base.errors import MachineError
from hone.base.run import Run
from hone.measure.amx import cpu_isa_limit
from hone.measure.calibration import Calibration, read_calibration
from hone.measure.memory import resident_bytes
from hone.measure.topology.limits import lines_of, memory_limit, processor_quota

TORCH_BYTES = 350 << 20
"""Without a calibration, resident memory of a process that has imported torch (2.13 for CPUs) and started its threads."""

STAGE_BYTES = 40 << 20
"""What the modules and libraries of a stage add before its work: tokenizers, Arrow, safetensors (30 to 100 MiB)."""


class Gpu(BaseModel):
    """One CUDA device as torch sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: int
    capability: str
    num_multiprocessors: int


class Machine(BaseModel):
    """Facts about a machine that hone.json records with every figure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cpu_isa_limit: str | None = Field(None, description="Instruction set that oneDNN is limited to; None: no limit.")
    num_cores: int = Field(description="Physical cores this process may use.")
    num_threads: int = Field(description="Logical processors this process may use (affinity and cgroup quota).")
    ram_bytes: int = Field(description="Memory this process may use (cgroup limit, else all).")
    gpus: tuple[Gpu, ...] = ()
    os: str
    python: str
    torch: str | None
    device: str = Field("cpu", description="Device the description was made for.")
    num_ranks: int = Field(1, description="Processes that work together, each on a device like `device`.")
    num_local_ranks: int | None = Field(None, description="Those of them on this machine; None: all.")
    calibration: Calibration | None = Field(None, description="Measured rates of `device`; None when never calibrated.")
    planned: bool = Field(
        False, exclude=True, description="Whether it is that of a plan alone, whose ranks need not be there."
    )

    @property
    def elsewhere(self) -> bool:
        """Whether its GPU is one of a data sheet, for a plan of a machine that is not this one."""
        return bool(self.gpus) and self.gpus[0].num_multiprocessors == 0

    @property
    def local_ranks(self) -> int:
        """Processes of the run that share this machine's memory, threads and disk."""
        return self.num_local_ranks or self.num_ranks

    def on_ranks(self, num_ranks: int) -> Machine:
        """So many ranks, each with the memory of this one, which need not be there: those of a CPU are on machines of their own."""
        local = self.local_ranks if not self.device.startswith("cuda") else min(num_ranks, max(len(self.gpus), 1))
        return self.model_copy(update={"num_ranks": num_ranks, "num_local_ranks": local, "planned": True})

    @property
    def processor(self) -> str:
        """Name of the processor of `device`: the GPU's for a CUDA device, else the CPU's."""
        if self.device.startswith("cuda") and self.gpus:
            return self.gpus[_index(self.device)].name
        return self.cpu

    @property
    def memory_bytes(self) -> int:
        """Memory of `device`: the GPU's for a CUDA device, else the memory that this process may use."""
        if self.device.startswith("cuda") and self.gpus:
            return self.gpus[_index(self.device)].memory_bytes
        return self.ram_bytes

    @property
    def process_bytes(self) -> float:
        """Memory of `device` that a process with torch takes before it works; on a GPU torch's tensors alone are counted."""
        if self.device.startswith("cuda"):
            return 0.0
        found = self.calibration.process_bytes if self.calibration is not None else None
        return (found or TORCH_BYTES) + STAGE_BYTES

    @property
    def resident_bytes(self) -> float:
        """Memory of `device` that this process takes now."""
        return 0.0 if self.device.startswith("cuda") else resident_bytes()

    @property
    def free_memory_bytes(self) -> float:
        """`memory_bytes` without the memory that this process already uses (on a GPU, torch's tensors); ranks share a CPU's."""
        if not self.device.startswith("cuda"):
            return self.memory_bytes / self.local_ranks - max(resident_bytes(), self.process_bytes)
        torch = sys.modules.get("torch")  # without torch this process has no memory there
        return self.memory_bytes - (torch.cuda.memory_allocated(self.device) if torch is not None else 0)


def machine_of(run: Run) -> Machine:
    """The machine that `run` names; this one by default. With as many ranks as `run.mesh`."""
    machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
    local = run.mesh.local_world_size
    return machine.model_copy(update={"num_ranks": run.mesh.world_size, "num_local_ranks": local})


@cache
def describe(device: str = "cpu") -> Machine:
    """This machine for work on `device` ('cpu', 'cuda', 'cuda:1'). Imports torch only for a CUDA device.

    Raises MachineError when `device` does not exist. Cached; `describe.cache_clear()` after a calibration.
    """
    allowed = _allowed_processors()
    threads = _quota(len(allowed))
    machine = Machine(
        cpu=_cpu_name(),
        cpu_isa_limit=cpu_isa_limit(),
        num_cores=min(_physical_cores(allowed), threads),
        num_threads=threads,
        ram_bytes=_ram_bytes(),
        gpus=_gpus(device) if device.startswith("cuda") else (),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_torch_version(),
        device=device,
    )
    return machine.model_copy(update={"calibration": read_calibration(identity(machine))})


_SETTINGS = {
    "cpu": ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    "cuda": ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
}
"""Environment variables that change how fast torch multiplies, for each kind of device."""


def identity(machine: Machine) -> dict[str, str]:
    """What a calibration depends on: the processor, the part of it that is used, torch's version and its settings."""
    kind = "cuda" if machine.device.startswith("cuda") else "cpu"
    found = {"device": kind, "processor": machine.processor, "torch": str(machine.torch)}
    if machine.gpus and kind == "cuda":  # a slice of a GPU has its name, too
        gpu = machine.gpus[_index(machine.device)]
        found |= {"multiprocessors": str(gpu.num_multiprocessors), "memory_bytes": str(gpu.memory_bytes)}
    if kind == "cpu":
        found |= {"cores": str(machine.num_cores), "processors": str(machine.num_threads)}
        found |= {"cpu_isa_limit": str(machine.cpu_isa_limit)}
    return found | {name: os.environ[name] for name in _SETTINGS[kind] if name in os.environ}


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    for line in lines_of(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _allowed_processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(allowed: set[int]) -> int:
    """Cores behind the allowed logical processors: siblings of one core count once."""
    cores = set()
    for number in allowed:
        siblings = lines_of(Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"))
        cores.add(siblings[0] if siblings else str(number))
    return len(cores)


def _quota(threads: int) -> int:
    """`threads`, or fewer when a cgroup grants less processor time."""
    return max(1, min(threads, int(processor_quota() or threads)))


def _ram_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit() or total)


def _gpus(device: str) -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available() or _index(device) >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise MachineError(f"no device {device}: torch sees {count} CUDA devices", fix="use --device=cpu")
    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(
            Gpu(
                name=found.name,
                memory_bytes=found.total_memory,
                capability=f"{found.major}.{found.minor}",
                num_multiprocessors=found.multi_processor_count,
            )
        )
    return tuple(gpus)
