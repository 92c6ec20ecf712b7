"""Bandwidth and latency of the disk of one folder, past the page cache where the file system allows it."""

from __future__ import annotations

import mmap
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from hone.measure.probe.result import DiskRates, Sample

_BLOCK, _PAGE = 1 << 20, 4096
_READS = 200
_BUDGET_S = 3.0
"""Most seconds of each of the three parts: a slow disk has fewer turns."""


def probe_disk(folder: Path, file_bytes: int, turns: int = 5) -> tuple[DiskRates | None, str]:
    """Rates of the disk of `folder`, by a file of `file_bytes` that is removed afterwards; or None, and why.

    Writes of 1 MiB until fsync returns, reads of 1 MiB in order, and single reads of 4 KiB at random places, one at a time.
    """
    path = folder / "probe"
    direct = getattr(os, "O_DIRECT", 0)
    try:
        if direct:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600))
            except OSError:
                direct = 0  # tmpfs and some overlays refuse
        buffer = mmap.mmap(-1, _BLOCK)  # O_DIRECT wants whole, aligned pages
        buffer.write(random.Random(0).randbytes(_BLOCK))  # zeros may not be written at all
        writes = _turns(turns, lambda: _write(path, buffer, file_bytes, direct))
        reads = _turns(turns, lambda: _read(path, buffer, file_bytes, direct))
        singles = _singles(path, file_bytes, direct)
    except OSError as error:
        return None, f"the disk of {folder} was not measured: {error.strerror or error}"
    finally:
        with suppress(OSError):
            path.unlink()
    rates = DiskRates(
        folder=str(folder),
        direct=bool(direct),
        file_bytes=file_bytes,
        write_bytes_per_s=Sample.of([file_bytes / one for one in writes]),
        read_bytes_per_s=Sample.of([file_bytes / one for one in reads]),
        read_latency_s=Sample.of(singles) if singles else None,
    )
    return rates, ""


def _turns(turns: int, work) -> list[float]:
    found: list[float] = []
    while len(found) < turns and (not found or sum(found) < _BUDGET_S):
        found.append(work())
    return found


def _write(path: Path, buffer: mmap.mmap, file_bytes: int, direct: int) -> float:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
    try:
        begun = time.perf_counter()
        for _ in range(file_bytes // _BLOCK):
            if os.writev(file, [buffer]) != _BLOCK:
                raise OSError(0, "a write was cut short: the disk may be full")
        os.fsync(file)
        return time.perf_counter() - begun
    finally:
        os.close(file)


def _forget(file: int, direct: int) -> None:
    """Drops what the page cache holds of an open file, where reads go through it."""
    if not direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, buffer: mmap.mmap, file_bytes: int, direct: int) -> float:
    file = os.open(path, os.O_RDONLY | direct)
    try:
        _forget(file, direct)
        begun = time.perf_counter()
        while os.readv(file, [buffer]):
            pass
        return time.perf_counter() - begun
    finally:
        os.close(file)


def _singles(path: Path, file_bytes: int, direct: int) -> list[float]:
    """Seconds of single reads of 4 KiB at random places."""
    if not hasattr(os, "preadv"):
        return []
    page, found, draw = mmap.mmap(-1, _PAGE), [], random.Random(1)
    file = os.open(path, os.O_RDONLY | direct)
    try:
        begun = time.perf_counter()
        for place in draw.sample(range(file_bytes // _PAGE), min(_READS, file_bytes // _PAGE)):
            _forget(file, direct)
            before = time.perf_counter()
            os.preadv(file, [page], place * _PAGE)
            found.append(time.perf_counter() - before)
            if time.perf_counter() - begun > _BUDGET_S:
                break
    finally:
        os.close(file)
    return found
