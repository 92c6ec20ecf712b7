"""Unified memory: whether a GPU shares the host's, and what managed memory costs where it moves by page faults or ahead of use.

Torch allocates no managed memory: the CUDA runtime that it has loaded is called by ctypes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.measure.probe.result import Sample, Transfer
from hone.measure.topology.limits import lines_of

TURNS = 5
_INTEGRATED, _MANAGED, _CONCURRENT, _HOST_TABLES = 18, 83, 89, 100
"""cudaDevAttrIntegrated, -ManagedMemory, -ConcurrentManagedAccess, -PageableMemoryAccessUsesHostPageTables (driver_types.h)."""
_GLOBAL = 1
"""cudaMemAttachGlobal."""
_ON_DEVICE, _ON_HOST = 1, 2
"""cudaMemLocationTypeDevice, -Host."""


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


@cache
def runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises OSError where none is."""
    torch.cuda.init()
    for line in lines_of(Path("/proc/self/maps")):
        path = line.split(maxsplit=5)[-1] if "/" in line else ""
        if Path(path).name.startswith("libcudart"):
            return ctypes.CDLL(path)
    return ctypes.CDLL("libcudart.so")


def _attribute(number: int, index: int) -> int:
    value = ctypes.c_int(0)
    return value.value if not runtime().cudaDeviceGetAttribute(ctypes.byref(value), number, index) else 0


def unified(index: int) -> str:
    """Why a GPU and the host share one memory; "" where they do not, or it cannot be asked."""
    try:
        if _attribute(_INTEGRATED, index):
            return "integrated: GPU and processors have one memory"
        if _attribute(_HOST_TABLES, index):
            return "coherent: the GPU uses the host's page tables and reads its memory over the link between them"
    except (OSError, AttributeError):
        return ""
    return ""


class Managed:
    """Managed memory of `num_bytes`, as a tensor on the GPU and as an array on the host. Raises RuntimeError where there is none."""

    def __init__(self, num_bytes: int, index: int) -> None:
        self._pointer, self.num_bytes, self.index = ctypes.c_void_p(), num_bytes, index
        code = runtime().cudaMallocManaged(
            ctypes.byref(self._pointer), ctypes.c_size_t(num_bytes), ctypes.c_uint(_GLOBAL)
        )
        if code or not self._pointer.value:
            raise RuntimeError(f"cudaMallocManaged: error {code}")
        self.host = np.frombuffer((ctypes.c_char * num_bytes).from_address(self._pointer.value), dtype=np.uint8)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes // 4,),
            "typestr": "<f4",
            "data": (self._pointer.value, False),
            "version": 3,
        }
        self.tensor = torch.as_tensor(self, device=f"cuda:{index}")
        assert self.tensor.data_ptr() == self._pointer.value, "the tensor is the memory, not a copy"

    def prefetch(self, *, to_device: bool) -> None:
        """Moves it to the GPU or to the host, before the next work of this stream."""
        library, stream = runtime(), ctypes.c_void_p(torch.cuda.current_stream(self.index).cuda_stream)
        version = ctypes.c_int(0)
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        size = ctypes.c_size_t(self.num_bytes)
        if version.value >= 13000:
            place = _Location(_ON_DEVICE, self.index) if to_device else _Location(_ON_HOST, 0)
            code = library.cudaMemPrefetchAsync(self._pointer, size, place, ctypes.c_uint(0), stream)
        else:
            code = library.cudaMemPrefetchAsync(self._pointer, size, self.index if to_device else -1, stream)
        if code:
            raise RuntimeError(f"cudaMemPrefetchAsync: error {code}")

    def close(self) -> None:
        torch.cuda.synchronize(self.index)
        del self.tensor, self.host
        runtime().cudaFree(self._pointer)


def managed_transfers(index: int, num_bytes: int) -> tuple[list[Transfer], str]:
    """How fast a GPU reads managed memory that the host has written: by page faults, by a prefetch, and when it is there; or why not.

    Each turn the host writes all of it first, which takes the pages back.
    """
    try:
        if not _attribute(_MANAGED, index) or not _attribute(_CONCURRENT, index):
            return [], "managed memory was not measured: the driver does not move its pages on demand"
        memory = Managed(num_bytes, index)
    except (OSError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        return [], f"managed memory was not measured: {str(error).partition(chr(10))[0]}"
    read: Callable[[], object] = lambda: memory.tensor.view(-1, 1024).sum(1)  # noqa: E731
    found: dict[str, list[float]] = {"by page faults": [], "prefetch": [], "where it is": []}
    try:
        for turn in range(TURNS + 1):
            memory.host[:] = turn
            faults = _seconds(read, index)
            memory.host[:] = turn
            ahead = _seconds(lambda: memory.prefetch(to_device=True), index)
            there = _seconds(read, index)
            if turn:
                for name, took in zip(found, (faults, ahead, there), strict=True):
                    found[name].append(took)
    except RuntimeError as error:
        return [], f"managed memory was not measured: {str(error).partition(chr(10))[0]}"
    finally:
        memory.close()
    return [
        Transfer(
            device=index,
            what=f"managed memory, {name}",
            num_bytes=num_bytes,
            bytes_per_s=Sample.of([num_bytes / one for one in took]),
        )
        for name, took in found.items()
    ], ""


def _seconds(work: Callable[[], object], index: int) -> float:
    torch.cuda.synchronize(index)
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize(index)
    return time.perf_counter() - begun
