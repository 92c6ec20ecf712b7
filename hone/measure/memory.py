"""Peak memory of a piece of work: resident bytes of this process, or allocated bytes of a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_SAMPLE_S = 0.01


def resident_bytes() -> int:
    """Resident bytes of this process, mapped files included."""
    return _status("VmRSS")


def give_back() -> None:
    """Returns freed memory of this process to the system.

    glibc keeps freed memory for later; the growth of a later stage into it would not be measured.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library: not supported
        ctypes.CDLL(None).malloc_trim(0)


class PeakMeter:
    """The highest memory use between `open` and `close`, for meters that may be nested.

    The kernel has one high-water mark per process and CUDA's allocator one per device, so the marks are shared: whenever a
    meter opens or closes, the mark since the last such moment is given to every open meter, then reset.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.start_bytes = 0
        self.peak_bytes = 0

    def open(self) -> None:
        """Starts measuring; `start_bytes` is the memory in use now."""
        watch = _watch(self.device)
        with watch.lock:
            if not watch.meters:
                watch.settle()
            watch.hand_over()
            self.start_bytes = self.peak_bytes = watch.now()
            watch.meters.append(self)

    def close(self) -> None:
        """Stops measuring; `peak_bytes` is final."""
        watch = _watch(self.device)
        with watch.lock:
            watch.hand_over()
            watch.meters.remove(self)
            if not watch.meters:
                watch.rest()


class _Watch:
    """One shared high-water mark and the meters that are open on it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.meters: list[PeakMeter] = []

    def hand_over(self) -> None:
        peak = self.peak_and_reset()
        for meter in self.meters:
            meter.peak_bytes = max(meter.peak_bytes, peak)

    def now(self) -> int:
        raise NotImplementedError

    def peak_and_reset(self) -> int:
        """The mark since the last call (or the start of the process); starts a new one."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called before the first meter opens."""

    def rest(self) -> None:
        """Called after the last meter closed."""


class _Resident(_Watch):
    """VmHWM, reset by writing 5 to clear_refs (Linux 4.0); where that is not allowed, samples of VmRSS."""

    def __init__(self) -> None:
        super().__init__()
        self._sampler: _Sampler | None = None

    def settle(self) -> None:
        give_back()

    def now(self) -> int:
        return resident_bytes()

    def peak_and_reset(self) -> int:
        if self._sampler is None:
            peak = _status("VmHWM")
            try:
                _CLEAR.write_text("5")
            except OSError:
                self._sampler = _Sampler()
                return peak if not self.meters else resident_bytes()
            return peak
        return self._sampler.peak_and_reset()

    def rest(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None


class _Sampler:
    """A thread that reads VmRSS every 10 ms; it misses shorter peaks, so it is only the fallback."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held from reading VmRSS to keeping it: a sample from before a reset must not come after it."""
        self._peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hone-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            with self._lock:
                self._peak = max(self._peak, resident_bytes())

    def peak_and_reset(self) -> int:
        with self._lock:
            now = resident_bytes()
            peak, self._peak = max(self._peak, now), now
            return peak

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class _Allocated(_Watch):
    """Bytes of live tensors in torch's CUDA allocator; without the memory of the driver and libraries."""

    def __init__(self, device: str) -> None:
        super().__init__()
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)

    def settle(self) -> None:
        gc.collect()  # tensors in reference cycles would be freed during the work and hide growth

    def now(self) -> int:
        return self._torch.cuda.memory_allocated(self._device)

    def peak_and_reset(self) -> int:
        peak = self._torch.cuda.max_memory_allocated(self._device)
        self._torch.cuda.reset_peak_memory_stats(self._device)
        return peak


# The marks are per process and per device, so there is one watch for each.
_WATCHES: dict[str, _Watch] = {}
_WATCHES_LOCK = threading.Lock()


def _watch(device: str) -> _Watch:
    device = "cuda:0" if device == "cuda" else device
    with _WATCHES_LOCK:
        if device not in _WATCHES:
            _WATCHES[device] = _Allocated(device) if device.startswith("cuda") else _Resident()
        return _WATCHES[device]


def _status(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{_STATUS} has no {field}")
