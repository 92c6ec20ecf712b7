"""Host memory that a GPU copies from directly (pinned memory), of exactly the bytes asked for.

torch's own pinned allocator rounds sizes up to powers of two: with layers of 416 MiB a fifth of the memory would be wasted.
"""

from __future__ import annotations

import mmap
import resource
import weakref
from contextlib import suppress

import psutil
import torch
from torch import Tensor

from hone.base.errors import FitError, MachineError
from hone.base.figure import human_bytes
from hone.measure.machine import describe

_PAGE = mmap.PAGESIZE


_FIX = "raise the container's memory limit or ulimit -l, end other processes, or raise engine.gpu_memory so that fewer layers stream"


def host_memory(num_bytes: int, *, pin: bool, what: str = "a layer's weights", fix: str = _FIX) -> Tensor:
    """Uninitialised memory, uint8 [num_bytes], on its own pages; with `pin` pinned until the tensor is gone.

    Raises MachineError, with `what` it is for and the `fix`, when the system refuses to pin it.
    """
    size = max(1, -(-num_bytes // _PAGE)) * _PAGE
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # fewer pages to pin, where the system has large ones
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8, count=max(num_bytes, 1))[:num_bytes]
    if pin:
        address = memory.data_ptr()
        error = _register(address, size)
        if error:
            raise MachineError(
                f"{human_bytes(size)} of host memory for {what} cannot be pinned (CUDA error {error}): "
                f"{human_bytes(psutil.virtual_memory().available)} of RAM are free, ulimit -l is {_locked_limit()}; memory that "
                "other processes have pinned counts, too",
                fix=fix,
            )
        weakref.finalize(memory, _unregister, address)
    return memory


_TOO_MANY = "raise engine.gpu_memory, compress the model (hone compress), or add memory"


def check_host(num_bytes: float, *, what: str = "the streamed layers", fix: str = _TOO_MANY) -> None:
    """Raises FitError when `num_bytes` of weights are more than the host's free memory."""
    free = min(psutil.virtual_memory().available, describe().free_memory_bytes)
    if num_bytes > free:
        raise FitError(
            f"{what} take {human_bytes(num_bytes)} of host memory, {human_bytes(free)} are free",
            fix=fix,
        )


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else human_bytes(limit)


def _register(address: int, size: int) -> int:
    """Pins memory; CUDA's error code, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # 1: for every context of the process


def _unregister(address: int) -> None:
    with suppress(RuntimeError):  # a GPU that failed has no copies either
        torch.cuda.synchronize()  # one may be under way
        torch.cuda.cudart().cudaHostUnregister(address)
