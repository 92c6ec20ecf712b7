"""A scratch file for a training's state: read and written past the page cache by threads, or mapped like ordinary tensors."""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import FitError, MachineError
from hone.base.figure import human_bytes
from hone.serve.offload.pinned import host_memory

PAGE = 4096
"""Offsets, sizes and addresses of reads and writes past the page cache (O_DIRECT) are multiples of this."""

PIECE = 8 << 20
"""Bytes that one thread reads or writes at a time: several in flight fill an NVMe disk's queue."""

THREADS = 8
"""Threads that read and write."""


@dataclass(frozen=True)
class Span:
    """A tensor's place in the file: `offset` in bytes, a multiple of `PAGE`."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its bytes, without what fills up the last page."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def layout(tensors: Mapping[Any, Tensor]) -> tuple[dict[Any, Span], int]:
    """Places for tensors (only shape and dtype count, on any device), one after the other, and the bytes of all."""
    spans, at = {}, 0
    for key, tensor in tensors.items():
        spans[key] = Span(at, tuple(tensor.shape), tensor.dtype)
        at += -(-max(spans[key].num_bytes, 1) // PAGE) * PAGE
    return spans, at


def aligned(num_bytes: int) -> Tensor:
    """Uninitialised memory that starts at a page, whole pages of it: uint8 [>= num_bytes]."""
    return host_memory(-(-max(num_bytes, 1) // PAGE) * PAGE, pin=False)


def pinned(numbers: int, dtype: torch.dtype, *, pin: bool) -> tuple[Tensor, Tensor]:
    """Host memory [numbers], pinned for a GPU, in whole pages where torch's own allocator takes powers of two; and its owner,
    which must live as long. Raises MachineError when the system refuses to pin it."""
    fix = "raise the container's memory limit or ulimit -l, or leave parallelism.offload.parameters out"
    memory = host_memory(numbers * dtype.itemsize, pin=pin, what="training state", fix=fix)
    return memory.view(dtype), memory


class ScratchFile:
    """A file of `num_bytes` zeros in `folder` that has no name: whatever ends this process, the system frees its blocks.

    So several trainings may use one folder, and after a crash nothing is left to remove. All blocks are allocated at once: a
    full disk is an error here, not in the middle of a step. `direct`: reads and writes pass by the page cache (O_DIRECT);
    `note` says why they do not, where the file system refuses it. Raises FitError when the disk is full, MachineError when the
    folder cannot be used.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self.num_bytes = folder, -(-max(num_bytes, PAGE) // PAGE) * PAGE
        self.note = ""
        self.read_bytes = self.written_bytes = 0
        self.io_s = 0.0
        """Seconds in which the caller waited for reads and writes."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            status = os.statvfs(folder)
            if (
                self.num_bytes > status.f_bavail * status.f_frsize
            ):  # else the disk would be full until the system notices
                raise OSError(errno.ENOSPC, "full")
            self._mapped, self._direct = _opened(folder)
            try:
                os.posix_fallocate(self._mapped, 0, self.num_bytes)
            except OSError:
                os.close(self._mapped)
                if self._direct is not None:
                    os.close(self._direct)
                raise
        except OSError as error:
            raise _failed(folder, self.num_bytes, error) from None
        self.direct = self._direct is not None
        if not self.direct:
            self.note = f"{folder} refuses O_DIRECT: training state is read and written through the page cache, which takes host memory"
        held = [one for one in (self._mapped, self._direct) if one is not None]
        self._threads = ThreadPoolExecutor(THREADS, "hone-offload")
        self.close = weakref.finalize(self, _close, held, self._threads)
        """Frees the file; called when this object is gone, too."""
        self._memory: mmap.mmap | None = None

    def tensor(self, span: Span) -> Tensor:
        """The tensor at `span` as memory: pages are read when they are looked at and written back by the system."""
        if self._memory is None:
            self._memory = mmap.mmap(self._mapped, self.num_bytes)
        if not span.num_bytes:
            return torch.empty(span.shape, dtype=span.dtype)
        count = span.num_bytes // span.dtype.itemsize
        return torch.frombuffer(self._memory, dtype=span.dtype, count=count, offset=span.offset).view(span.shape)

    def flush(self) -> None:
        """Brings what was written through `tensor` into the file, before it is read past the cache."""
        if self._memory is not None:
            self._memory.flush()
            with suppress(OSError):
                os.posix_fadvise(self._mapped, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, memory: Tensor, offset: int) -> list[Future]:
        """Starts to fill `memory` (uint8, of `aligned`, whole pages) from `offset` on."""
        self.read_bytes += len(memory)
        return self._pieces(self._read, memory, offset)

    def write(self, memory: Tensor, offset: int) -> list[Future]:
        """Starts to write `memory`, as `read` has it, which must stay as it is until then."""
        self.written_bytes += len(memory)
        return self._pieces(self._write, memory, offset)

    def wait(self, moving: Sequence[Future]) -> None:
        """Waits for reads or writes. Raises MachineError when one failed."""
        begun = time.perf_counter()
        try:
            for one in moving:
                one.result()
        except OSError as error:
            raise _failed(self.folder, self.num_bytes, error) from None
        finally:
            self.io_s += time.perf_counter() - begun

    def _pieces(self, move: Any, memory: Tensor, offset: int) -> list[Future]:
        assert len(memory) % PAGE == 0 and offset % PAGE == 0, "whole pages are moved"
        view = memoryview(memory.numpy())
        return [self._threads.submit(move, view[at : at + PIECE], offset + at) for at in range(0, len(memory), PIECE)]

    def _read(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.preadv(self._direct or self._mapped, [view], offset)
            if not count:
                raise OSError(errno.EIO, "the scratch file ends too early")
            view, offset = view[count:], offset + count

    def _write(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwritev(self._direct or self._mapped, [view], offset)
            view, offset = view[count:], offset + count


def _opened(folder: Path) -> tuple[int, int | None]:
    """(a descriptor for the page cache, one for O_DIRECT or None) of a new file without a name in `folder`."""
    try:
        mapped = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        path = folder / f".offload-{os.getpid()}-{time.monotonic_ns()}"
        mapped = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            return mapped, _direct(str(path))
        finally:
            path.unlink()
    return mapped, _direct(f"/proc/self/fd/{mapped}")


def _direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None


def _close(descriptors: Sequence[int], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=True)
    for one in descriptors:
        os.close(one)


def _failed(folder: Path, num_bytes: int, error: OSError) -> FitError | MachineError:
    fix = "set parallelism.offload.folder to a folder on a larger disk, or keep less there: parallelism.offload: host"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with suppress(OSError):
            status = os.statvfs(folder)
            free = f", {human_bytes(status.f_bavail * status.f_frsize)} are free"
            return FitError(f"training state takes {human_bytes(num_bytes)} in {folder}{free}", fix=fix)
        return FitError(f"training state takes {human_bytes(num_bytes)} in {folder}, which is full", fix=fix)
    return MachineError(
        f"training state cannot be kept in {folder}: {error.strerror or error}",
        fix="set parallelism.offload.folder to a folder of a local disk that may be written",
    )
