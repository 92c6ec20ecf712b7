"""Power traces: what a device draws and how it is clocked, many times a second beside a piece of work, as CSV, and read back."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TextIO

from hone.base.errors import ArtifactError
from hone.base.figure import Figure, How
from hone.measure.clocks.nvml import POWER_CAP, THERMAL, Gpu, open_gpu

COLUMNS = ("timestamp_s", "device", "power_w", "energy_mj", "sm_mhz", "mem_mhz", "temp_c", "util", "throttle")
"""Of the file. Seconds since the epoch; `util` is a share, `throttle` NVML's bits. What a device does not show is empty."""
RATE_HZ = 10.0
GAP = 5.0
"""Times the usual interval between two rows, above which nothing is known of what was drawn between them."""


class Sample(NamedTuple):
    """One row of a trace; None: not shown by the device."""

    timestamp_s: float
    device: str
    power_w: float | None = None
    energy_mj: int | None = None
    sm_mhz: int | None = None
    mem_mhz: int | None = None
    temp_c: float | None = None
    util: float | None = None
    throttle: int | None = None


def sample_of(gpu: Gpu, device: str, now: float) -> Sample:
    """What `gpu` shows now."""

    def shown(read: Callable[[], object]) -> object:
        try:
            return read()
        except OSError:
            return None

    clocks = shown(gpu.clocks_mhz) or (None, None)
    rest = [shown(gpu.temperature_c), shown(gpu.utilization), shown(gpu.throttle)]
    return Sample(now, device, shown(gpu.power_w), shown(gpu.energy_mj), *clocks, *rest)  # type: ignore[arg-type,misc]


class Recorder:
    """Writes a trace of `device` into `path` from `start` to `stop`, by a thread. Without a reading it writes nothing; `note` says why."""

    def __init__(
        self, device: str, path: Path, *, gpu: Gpu | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.device, self.path, self._clock = device, path, clock
        self._gpu, self.note = (gpu, "") if gpu is not None else _opened(device)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TextIO | None = None

    def start(self) -> None:
        """Begins; an earlier trace in the file, of a process that was killed, stays and is continued."""
        if self._gpu is None:
            return
        there = self.path.exists() and self.path.stat().st_size > 0
        self._file = open(self.path, "a", newline="", encoding="utf8")
        if not there:
            csv.writer(self._file).writerow(COLUMNS)
        self.look()
        self._thread = threading.Thread(target=self._run, name="hone-power", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Writes one row."""
        assert self._gpu is not None and self._file is not None, "begun with a device that shows its power"
        row = sample_of(self._gpu, self.device, self._clock())
        csv.writer(self._file).writerow(["" if value is None else value for value in row])

    def _run(self) -> None:
        while not self._stopped.wait(1 / RATE_HZ):
            self.look()

    def stop(self) -> None:
        """Ends the thread and closes the file."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self.look()
            self._file.close()
            self._file = None


def _opened(device: str) -> tuple[Gpu | None, str]:
    if not device.startswith("cuda"):
        return None, "no power trace: RAPL shows the energy of a processor, not its clock and heat"
    gpu, note = open_gpu(device)
    return gpu, note if gpu is not None else f"no power trace: {note}"


def read_trace(path: Path) -> list[Sample]:
    """The rows of a trace in order of time; a last row that a kill cut off is left out.

    Raises ArtifactError, with the line, for a file with other columns or no numbers.
    """
    try:
        lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}", fix="check the path") from None
    except UnicodeDecodeError:
        raise ArtifactError(
            f"{path} is no power trace: no text in UTF-8", fix="give log/power.csv of a stage"
        ) from None
    if not lines or tuple(lines[0].strip().split(",")) != COLUMNS:
        raise ArtifactError(f"{path} is no power trace", fix=f"its first line is {','.join(COLUMNS)}")
    if not lines[-1].endswith("\n"):
        lines.pop()
    found = []
    for number, row in enumerate(csv.reader(lines[1:]), 2):
        try:
            time_s, device, *rest = row
            power, energy, sm, mem, temp, util, throttle = (float(one) if one else None for one in rest)
            whole = [None if one is None else int(one) for one in (energy, sm, mem, throttle)]
            found.append(Sample(float(time_s), device, power, *whole[:3], temp, util, whole[3]))
        except (ValueError, OverflowError):
            raise ArtifactError(
                f"{path}, line {number}: not the numbers of a power trace", fix="record it again"
            ) from None
    return sorted(found, key=lambda row: row.timestamp_s)  # rows that are not shown cannot be compared


class Summary(NamedTuple):
    """What a trace of one device says: joules are the counter's, or the sum of its power where it has none.

    `gaps_s` are seconds without readings, in which power, the power limit and heat are not known: they are in `seconds` and in no
    other sum. Only a counter counts on in them. `mean_w` is of the time that `joules` are of.
    """

    seconds: float
    joules: float | None
    mean_w: float | None
    peak_w: float | None
    capped_s: float
    hot_s: float
    gaps_s: float = 0.0


def summary(rows: Sequence[Sample]) -> Summary:
    """The summary of the rows of one device. A gap is an interval longer than `GAP` usual ones, the median of the trace."""
    pairs, gaps_s = list(pairwise(rows)), 0.0
    if pairs:
        usual = median(other.timestamp_s - one.timestamp_s for one, other in pairs)
        whole = [other.timestamp_s - one.timestamp_s <= GAP * usual for one, other in pairs]
        gaps_s = sum(b.timestamp_s - a.timestamp_s for (a, b), seen in zip(pairs, whole, strict=True) if not seen)
        pairs = [pair for pair, seen in zip(pairs, whole, strict=True) if seen]
    seconds = rows[-1].timestamp_s - rows[0].timestamp_s if rows else 0.0
    counted = [row.energy_mj for row in rows if row.energy_mj is not None]
    shown = [(one, other) for one, other in pairs if one.power_w is not None and other.power_w is not None]
    added = sum((other.timestamp_s - one.timestamp_s) * (one.power_w + other.power_w) / 2 for one, other in shown)  # type: ignore[operator]
    # A counter that fell is one of a driver that was loaded anew, in a trace that another process goes on with.
    grown = sum(max(after - before, 0) for before, after in pairwise(counted)) / 1e3
    joules = grown if len(counted) > 1 else added if shown else None
    peak = max((row.power_w for row in rows if row.power_w is not None), default=None)
    span = seconds if len(counted) > 1 else seconds - gaps_s
    mean = joules / span if joules is not None and span > 0 else None
    return Summary(seconds, joules, mean, peak, *(_lasted(pairs, bits) for bits in (POWER_CAP, THERMAL)), gaps_s)


def _lasted(pairs: Iterable[tuple[Sample, Sample]], bits: int) -> float:
    return sum(other.timestamp_s - one.timestamp_s for one, other in pairs if (one.throttle or 0) & bits)


def figures(rows: Sequence[Sample], how: How = "measured", note: str = "") -> list[Figure]:
    """power_mean_w, power_peak_w, and the seconds under the power limit and under heat; with `how` quoted for a trace from elsewhere."""
    found = summary(rows)
    if found.gaps_s:
        note = f"{note}; {found.gaps_s:.3g} of {found.seconds:.3g} s have no readings and are not filled".strip("; ")
    many = {"n": max(len(rows), 1), "how": how}
    return [
        Figure(name="power_mean_w", value=found.mean_w, unit="W", note=note, **many),
        Figure(
            name="power_peak_w",
            value=found.peak_w,
            unit="W",
            note=f"of {RATE_HZ:g} readings a second; {note}".strip("; "),
            **many,
        ),
        Figure(name="power_capped_s", value=found.capped_s, unit="s", note="at the power limit", **many),
        Figure(name="thermal_s", value=found.hot_s, unit="s", note="throttled by heat", **many),
    ]
