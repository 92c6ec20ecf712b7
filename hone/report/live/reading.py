"""Reads the logs of a training while it writes them: only what is new, whatever happens to the files meanwhile."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.base.durable import whole_number

STEPS, TIMING = "steps.jsonl", "log/timing.jsonl"
MANIFEST = "hone.json"
BEGUN = "begun.json"
"""What a partial folder says of the work that it is for."""
PARTIAL = ".partial"
POINTS = 2000
"""Points that a curve keeps; when there are twice as many, neighbours are joined into their mean."""
MOST_RUNS = 12
"""Trainings of one folder that are shown: those written to last."""
_MARK = 64
"""Bytes before the place read up to, by which a file that was written anew is told from one that grew."""
_CHUNK = 1 << 22


class Series:
    """A curve of bounded length: (step, value) in order; `last` is its newest point."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None
        self._each, self._pending = 1, [0.0, 0.0, 0.0]

    def add(self, step: float, value: Any) -> None:
        """Adds a point; what is no finite number is left out."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return
        self.last = (step, float(value))
        steps, values, count = (one + more for one, more in zip(self._pending, (step, value, 1.0), strict=True))
        self._pending = [steps, values, count]
        if count < self._each:
            return
        self.points.append((steps / count, values / count))
        self._pending = [0.0, 0.0, 0.0]
        if len(self.points) >= 2 * POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [((one + two) / 2, (a + b) / 2) for (one, a), (two, b) in pairs]
            self._each *= 2


class Tail:
    """Gives the new lines of a JSONL file to `take` as they are written; calls `again` before a file that was written anew.

    A line that is no JSON object is counted in `garbage`. The last line is read when it has its end.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], again: Callable[[], None]) -> None:
        self._take, self._again = take, again
        self._inode, self._at, self._mark = -1, 0, b""
        self.garbage = 0

    def poll(self, path: Path) -> bool:
        """Reads what is new in `path`; whether there was anything. A file that is not there has nothing."""
        try:
            with open(path, "rb") as file:
                return self._read(file)
        except OSError:  # not there yet, or moved this moment
            return False

    def _read(self, file: Any) -> bool:
        there = os.fstat(file.fileno())
        file.seek(max(self._at - _MARK, 0))
        if there.st_ino != self._inode or there.st_size < self._at or file.read(len(self._mark)) != self._mark:
            anew = self._at > 0
            self._inode, self._at, self._mark, self.garbage = there.st_ino, 0, b"", 0
            if anew:
                self._again()
        changed = False
        file.seek(self._at)
        rest = b""
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line)
            changed = changed or bool(lines)
        end = file.tell() - len(rest)
        if end > self._at:
            file.seek(max(end - _MARK, 0))
            self._at, self._mark = end, file.read(end - max(end - _MARK, 0))
        return changed

    def _line(self, line: bytes) -> None:
        try:
            row = json.loads(line, parse_int=whole_number)
            step = row["step"]
            if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            self.garbage += bool(line.strip())
            return
        self._take(row)


class RunLog:
    """What is known of the training that `folder` is made by: its curves, its newest numbers, whether it is done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.series: dict[str, Series] = {}
        self.ranks: dict[str, Any] | None = None
        """The newest times of all ranks, as timing.jsonl has them."""
        self.state = "waiting"
        """'waiting' for its first step, 'running' or 'done'."""
        self.written_at: float | None = None
        """When the newest line was written, in seconds since 1970."""
        self.spec: dict[str, Any] = {}
        self._steps = Tail(self._stepped, self._forget)
        self._timing = Tail(self._timed, self._forget_times)
        self._of_steps: set[str] = set()

    @property
    def garbage(self) -> int:
        """Lines that could not be read."""
        return self._steps.garbage + self._timing.garbage

    @property
    def total(self) -> int | None:
        """The steps that it will take, where its spec names them."""
        steps = self.spec.get("steps")
        return steps if isinstance(steps, int) else None

    def last(self, name: str) -> float | None:
        """The newest value of a curve."""
        found = self.series.get(name)
        return None if found is None or found.last is None else found.last[1]

    @property
    def step(self) -> int:
        """The newest step."""
        loss = [found.last[0] for name in ("lr", "loss") if (found := self.series.get(name)) and found.last]
        return int(max(loss, default=0))

    def poll(self) -> bool:
        """Reads what is new; whether anything changed."""
        done = (self.folder / MANIFEST).is_file()
        where = self.folder if done or not partial_of(self.folder).is_dir() else partial_of(self.folder)
        steps, timing = self._steps.poll(where / STEPS), self._timing.poll(where / TIMING)
        state = "done" if done else "running" if self.series else "waiting"
        changed = steps or timing or state != self.state
        self.state = state
        if changed:
            self._look(where)
        return changed

    def _look(self, where: Path) -> None:
        """Reads when the log was written, and once the spec."""
        try:
            self.written_at = (where / STEPS).stat().st_mtime
            if not self.spec:
                name = MANIFEST if self.state == "done" else BEGUN
                found = json.loads((where / name).read_text(encoding="utf8"))["spec"]
                self.spec = found if isinstance(found, dict) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _stepped(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step":
                self._of_steps.add(name)
                self.series.setdefault(name, Series()).add(row["step"], value)

    def _timed(self, row: dict[str, Any]) -> None:
        busy, wait = row.get("busy_s"), row.get("wait_s")
        if isinstance(busy, list) and isinstance(wait, list) and len(busy) == len(wait) > 0:
            if all(isinstance(one, int | float) and 0 <= one < math.inf for one in [*busy, *wait]):
                self.ranks = row
            return
        for name, value in row.items():
            if name != "step":
                self.series.setdefault(name, Series()).add(row["step"], value)

    def _forget(self) -> None:
        for name in self._of_steps:
            self.series.pop(name, None)

    def _forget_times(self) -> None:
        self.ranks = None
        for name in [*self.series]:
            if name not in self._of_steps:
                del self.series[name]


def partial_of(folder: Path) -> Path:
    """The folder in which `folder` is made."""
    return folder.with_name(folder.name + PARTIAL)


class Board:
    """The trainings of the given folders; each is one, finished or not, or a folder of them, or not there yet."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = [one.with_name(one.name.removesuffix(PARTIAL)) for one in folders]
        self._logs: dict[Path, RunLog] = {}
        self.version = 0
        """Counts the changes."""

    @property
    def runs(self) -> list[RunLog]:
        """The trainings, in the order of the folders."""
        return list(self._logs.values())

    def poll(self) -> int:
        """Reads what is new of all trainings; the version after it."""
        found = [one for folder in self.folders for one in _runs_of(folder)]
        logs = {folder: self._logs.get(folder) or RunLog(folder) for folder in dict.fromkeys(found)}
        changed = [*logs] != [*self._logs]
        self._logs = logs
        for log in logs.values():
            changed = log.poll() or changed
        self.version += changed
        return self.version


def _runs_of(folder: Path) -> list[Path]:
    """The trainings that `folder` names: itself, or those in it."""
    if partial_of(folder).is_dir() or (folder / STEPS).exists() or (folder / MANIFEST).exists():
        return [folder]
    found: dict[Path, float] = {}
    try:
        for path in folder.iterdir():
            if (path / STEPS).is_file():
                found[path.with_name(path.name.removesuffix(PARTIAL))] = (path / STEPS).stat().st_mtime
    except OSError:  # not there yet
        return [folder]
    newest = sorted(found, key=lambda path: -found[path])[:MOST_RUNS]
    return sorted(newest) or [folder]
