"""The circumstances of a run (device, redo, progress), which are never part of what a stage computes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hone.base.figure import human_bytes, human_seconds
from hone.base.ranks import Mesh


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the work in order. The text says where, and what is saved."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number
        """Of the signal."""

    @property
    def code(self) -> int:
        """The exit code of a command that ends with it."""
        return 128 + self.number


class Ending:
    """Whether Ctrl-C or SIGTERM came while work is in a block of `Run.ending`."""

    def __init__(self) -> None:
        self.number: int | None = None

    def asked(self) -> bool:
        """Whether the work should end as soon as what it has done is saved."""
        return self.number is not None

    def interrupted(self, text: str) -> Interrupted:
        """What the work raises when it has ended; another process may have been asked instead of this one."""
        return Interrupted(text, self.number or signal.SIGTERM)


@dataclass
class Run:
    """The circumstances of a stage, outside its identity.

    `device` is a torch device string. `redo` replaces a finished artifact. `machine` is the
    description for hone.json (`measure.machine.describe().model_dump()`), which includes the calibration for estimates.
    `quiet` silences progress and messages, not warnings. `executor` is where the tasks of a data stage run
    ('kind' and options of a technique of that slot). `wandb` names the project of Weights & Biases that gets the curves of
    trainings ('project' and the other options of `--wandb.`); None: nothing is sent.
    `profiling` says which steps of trainings are profiled (the options of `--profiling.`). `mesh` are the processes that work together.
    """

    device: str = "cpu"
    redo: bool = False
    quiet: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    executor: dict[str, Any] = field(default_factory=lambda: {"kind": "serial"})
    wandb: dict[str, Any] | None = None
    profiling: dict[str, Any] | None = None
    clock: dict[str, Any] | None = None
    """The policy of GPUs' clocks while stages work ('kind' and options of a technique of that slot); None: nothing is set."""
    power_trace: bool = False
    """Whether a power trace is recorded beside every stage, in its log/."""
    mesh: Mesh = field(default_factory=Mesh.from_environment)
    end: Ending = field(default_factory=Ending, compare=False)
    """What the last block of `ending` was asked: work that was whole before it could end is followed by no other."""

    def warn(self, text: str) -> None:
        """Prints a note that the user must know, also with `quiet`."""
        replace(self, quiet=False).say(f"note: {text}")

    def say(self, text: str) -> None:
        """Prints a message on standard error, above any progress bar."""
        if not self.quiet and self.mesh.leads:
            from rich.console import Console

            Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)

    @contextmanager
    def ending(self) -> Iterator[Ending]:
        """A block that Ctrl-C and SIGTERM do not interrupt, so that it can save its work: it looks at `Ending.asked` and ends
        itself. A second one interrupts it at once. Outside the main thread, where no handler can be set, both do as before.
        """
        ending = self.end
        ending.number = None
        if threading.current_thread() is not threading.main_thread():
            yield ending
            return

        def ask(number: int, _: object) -> None:
            if ending.asked():
                raise Interrupted("", number)
            ending.number = number
            if self.mesh.leads and not self.quiet:  # written as it is: `print` may be what was interrupted
                os.write(2, b"\nsaving what is done, then ending; once more ends at once\n")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield ending
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def progress(
        self, label: str, total: float | None, unit: str = "", screen: Callable[..., Progress | None] | None = None
    ) -> Iterator[Progress]:
        """A progress bar with rate and time left on a terminal; otherwise a line every few seconds.

        On a terminal `screen(label, total, unit)` is asked first for a larger view; None: the terminal has no room for it.
        """
        bar: Progress | None = None
        if self.quiet or not self.mesh.leads:
            bar = Progress(label, total, unit)
        elif sys.stderr.isatty():
            bar = (screen and screen(label, total, unit)) or Bar(label, total, unit)
        else:
            bar = Lines(label, total, unit)
        try:
            yield bar
        finally:
            bar.close()


LINE_S = 10.0
"""Seconds between lines of progress without a terminal; a log that is silent for longer seems to hang."""


class Progress:
    """Counts what is done of `total` (None: unknown), in `unit`; shows nothing. Subclasses show it."""

    def __init__(
        self, label: str, total: float | None, unit: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.text = ""
        self._clock = clock
        self._before = 0.0
        self._started = clock()

    def advance(self, amount: float = 1, text: str = "") -> None:
        """Adds `amount` to what is done; `text` is the latest result."""
        self.done += amount
        self.text = text

    def skip(self, amount: float) -> None:
        """Adds `amount` that an earlier run has done, which does not count for the rate."""
        self.done += amount
        self._before += amount

    def saw(self, row: dict[str, Any]) -> None:
        """Takes a line of the work's logs, for views that show more than `text`."""

    @property
    def rate(self) -> float:
        """`unit` per second, in this run."""
        return (self.done - self._before) / max(self._clock() - self._started, 1e-9)

    @property
    def pace(self) -> str:
        """The rate with its unit: '12,345 tokens/s', '0.027 layers/s'."""
        return f"{self.rate:{',.0f' if self.rate >= 10 else '.2g'}} {self.unit}/s"

    def close(self) -> None:
        """Ends the display."""


class Bar(Progress):
    """A bar on a terminal, removed at the end."""

    def __init__(self, label: str, total: float | None, unit: str = "") -> None:
        super().__init__(label, total, unit)
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

    def advance(self, amount: float = 1, text: str = "") -> None:
        super().advance(amount, text)
        shown = f"{self.pace}  {text}" if self.unit else text
        self._bar.update(self._task, advance=amount, text=shown)

    def skip(self, amount: float) -> None:
        super().skip(amount)
        self._bar.reset(self._task, completed=int(self.done), text="")

    def close(self) -> None:
        self._bar.stop()


class Lines(Progress):
    """Plain lines for a log, one every LINE_S, also during a long step."""

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(label, total, unit, clock)
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._said = self._started
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="hone-progress", daemon=True).start()

    def advance(self, amount: float = 1, text: str = "") -> None:
        super().advance(amount, text)
        self.say_if_due()

    def say_if_due(self) -> None:
        """Prints a line when the last one is LINE_S old."""
        with self._lock:
            now = self._clock()
            if now - self._said >= LINE_S and not self._closed.is_set():
                self._said = now
                self._write(self.line())

    def line(self) -> str:
        """The amount done, the rate, the latest result, and the time left."""
        parts = [f"{self.label}: {self._amount(self.done)}"]
        if self.total:
            parts[0] += f" of {self._amount(self.total)} ({min(self.done / self.total, 1):.0%})"
        if self.rate > 0:
            parts += [self.pace] if self.unit else []
            left = [self.total - self.done] if self.total else []
            parts += [self.text] if self.text else []
            parts += [f"{human_seconds(max(one, 0) / self.rate)} left" for one in left]
        else:
            parts.append(f"{human_seconds(self._clock() - self._started)} so far")
        return "  ".join(parts)

    def _amount(self, value: float) -> str:
        return human_bytes(value) if self.unit == "B" else f"{value:,.0f}"

    def _watch(self) -> None:
        """The thread that prints lines during long steps."""
        while not self._closed.wait(1.0):
            self.say_if_due()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
