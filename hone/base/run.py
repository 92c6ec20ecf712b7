"""Where and how a stage runs (device, redo, progress): never part of what it computes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hone.base.mesh import Mesh


@dataclass
class Run:
    """The circumstances of a stage, outside its identity.

    `device` is a torch device string. `redo` throws a finished artifact away and makes it again. `machine` is the
    description that goes into hone.json (`measure.machine.describe().model_dump()`); rooms that estimate read the
    calibration in it. `quiet` silences progress and remarks. `executor` says where the tasks of a data stage run
    ('kind' and options of a technique of that slot). `mesh` are the processes that work together.
    """

    device: str = "cpu"
    redo: bool = False
    quiet: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    executor: dict[str, Any] = field(default_factory=lambda: {"kind": "serial"})
    mesh: Mesh = field(default_factory=Mesh.from_environment)

    def say(self, text: str) -> None:
        """One remark on standard error, above any progress bar."""
        if not self.quiet and self.mesh.leads:
            from rich.console import Console

            Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: float | None, unit: str = "") -> Iterator[Progress]:
        """A progress line with rate and time left on a terminal; without one, nothing."""
        bar = Progress(label, total, unit, shown=not self.quiet and self.mesh.leads and sys.stderr.isatty())
        try:
            yield bar
        finally:
            bar.close()


class Progress:
    """One line that moves: `advance` it by what was done; `text` is shown after it."""

    def __init__(self, label: str, total: float | None, unit: str, *, shown: bool) -> None:
        self.done = 0.0
        self._started = time.monotonic()
        self._bar = None
        if shown:
            from rich import console as rich_console
            from rich import progress as rich_progress

            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(bar_width=24),
                rich_progress.TaskProgressColumn(),
                rich_progress.TextColumn("{task.fields[text]}"),
                rich_progress.TimeRemainingColumn(),
                transient=True,
                console=rich_console.Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(label, total=total, text="")
        self._unit = unit

    def advance(self, amount: float = 1, text: str = "") -> None:
        """Moves the bar by `amount`; shows the rate in `unit`/s and `text`."""
        self.done += amount
        if self._bar is not None:
            rate = self.done / max(time.monotonic() - self._started, 1e-9)
            shown = f"{rate:,.0f} {self._unit}/s  {text}" if self._unit else text
            self._bar.update(self._task, advance=amount, text=shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
