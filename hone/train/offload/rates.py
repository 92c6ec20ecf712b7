"""Measures the disk past its cache, one of the rates on which the place of a training's state depends."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.base.durable import write_atomic
from hone.base.errors import HoneError
from hone.cost.train.rates import BUFFERS, WINDOW, Rates, host_rates
from hone.measure.machine import Machine, describe

_PROBE_BYTES = 256 << 20
"""Bytes that are read and written past the page cache to measure a disk."""


def rates_of(machine: Machine, folder: str | None = None) -> Rates:
    """The rates of `machine`. With `folder`, the disk there is measured once (a second), if the machine is this one."""
    if folder is None:
        return host_rates(machine)
    disk = None if machine.elsewhere or machine.planned else _disk(Path(folder))
    return host_rates(machine, disk, files=True)


def nearest(folder: Path) -> Path:
    """`folder`, or while it is not made the nearest one above it that exists: both will be on one disk."""
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    return found


def _disk(folder: Path) -> tuple[float, float] | None:
    """(read, write) of the disk of `folder` while both go on, measured once and kept in the user's cache; None: it cannot be used."""
    folder = nearest(folder)
    where = hashlib.sha256(f"windows {folder.stat().st_dev} {describe('cpu').num_threads}".encode()).hexdigest()[:16]
    kept = None
    with suppress(RuntimeError):  # no home folder
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / f"disk-{where}.json"
        with suppress(OSError, ValueError, TypeError):
            found = json.loads(kept.read_text())
            return float(found["read"]), float(found["write"])
    measured = probe(folder)
    if measured is not None and kept is not None:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps({"read": measured[0], "write": measured[1]}).encode())
    return measured


def probe(folder: Path, num_bytes: int = _PROBE_BYTES) -> tuple[float, float] | None:
    """Bytes a second (read, write) of a scratch file of `num_bytes` in `folder`, all of it read and written back as an update does;
    None: it cannot be.

    Windows of three tensors, of an update's size or an eighth of the file, go through `BUFFERS` buffers: while one comes, another one goes.
    """
    from hone.train.offload.files import PAGE, ScratchFile, aligned

    size = max(min(4 * WINDOW, num_bytes // 24) // PAGE, 1) * PAGE
    count = max(num_bytes // (3 * size), 1)
    try:
        file = ScratchFile(folder, 3 * size * count)
    except HoneError:
        return None
    try:
        buffers = [aligned(3 * size).fill_(1) for _ in range(BUFFERS)]
        writing: list[list[Any]] = [[] for _ in range(BUFFERS)]

        def moved(move: Callable[[Any, int], list[Any]], window: int) -> list[Any]:
            parts = buffers[window % BUFFERS].split(size)
            return [one for at, part in enumerate(parts) for one in move(part, (at * count + window) * size)]

        for window in range(count):  # what was never written is not read from the disk
            file.wait(moved(file.write, window))
        begun = time.perf_counter()
        reading = [moved(file.read, window) for window in range(min(BUFFERS - 1, count))]
        for window in range(count):
            file.wait(reading[window])
            writing[window % BUFFERS] = moved(file.write, window)
            after = window + BUFFERS - 1
            if after < count:
                file.wait(writing[after % BUFFERS])
                reading.append(moved(file.read, after))
        for one in writing:
            file.wait(one)
        rate = 3 * size * count / (time.perf_counter() - begun)
    finally:
        file.close()
    return rate, rate
