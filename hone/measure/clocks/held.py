"""Clock locks and power limits of one GPU that do not outlive their process: restored at its end, or by the next one after a kill."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from hone.base.durable import write_atomic
from hone.base.errors import MachineError
from hone.measure.clocks.nvml import Gpu, NvmlError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process without running its `finally`. SIGINT raises KeyboardInterrupt; SIGKILL is what the file is for."""


class Setting(NamedTuple):
    """What is set on a GPU; None leaves it as the driver has it."""

    sm_mhz: int | None = None
    limit_w: float | None = None

    def __str__(self) -> str:
        said = [f"{self.sm_mhz} MHz"] if self.sm_mhz is not None else []
        said += [f"limit {self.limit_w:.0f} W"] if self.limit_w is not None else []
        return ", ".join(said) or "full clocks"


FULL = Setting()


class Held:
    """The settings of one GPU while `holding` holds it. `set` changes them; `restore` gives back what was there before."""

    def __init__(self, gpu: Gpu, path: Path, file: IO[str]) -> None:
        self.gpu = gpu
        self.now = FULL
        self._path, self._file = path, file
        self._before_w: float | None = None
        self._lock = threading.RLock()

    def set(self, setting: Setting) -> None:
        """Sets `setting` instead of the one before. Raises NvmlError when it is refused; then nothing is changed."""
        with self._lock:
            if setting == self.now:
                return
            if self._before_w is None and setting.limit_w is not None:
                self._before_w = self.gpu.limits_w()[2]
            self._note()  # before it is set: a process may be killed between the two
            if setting.limit_w != self.now.limit_w:
                self.gpu.set_limit_w(self._before_w if setting.limit_w is None else setting.limit_w)  # type: ignore[arg-type]
            if setting.sm_mhz != self.now.sm_mhz:
                try:
                    self._lock_clock(setting.sm_mhz)
                except NvmlError:
                    if setting.limit_w != self.now.limit_w and self._before_w is not None:
                        self.gpu.set_limit_w(self.now.limit_w or self._before_w)
                    raise
            self.now = setting

    def _lock_clock(self, mhz: int | None) -> None:
        if mhz is None:
            self.gpu.reset_clocks()
        else:
            self.gpu.lock_clocks(mhz)

    def _note(self) -> None:
        row = {"uuid": self.gpu.uuid, "limit_before_w": self._before_w, "pid": os.getpid()}
        write_atomic(self._path, json.dumps(row).encode())

    def restore(self) -> None:
        """Gives back the clocks and the power limit that were there before, and forgets the note of them."""
        with self._lock:
            if self._path.exists():
                _undo(self.gpu, self._before_w, changed=self.now)
                self._path.unlink(missing_ok=True)
            self.now = FULL


_HELD: list[Held] = []
"""What this process holds, for `restore_all`: a GPU's settings are of the whole process, as its device is."""


def restore_all() -> None:
    """Restores all that this process holds, where it ends without running its blocks' ends: before `os._exit`."""
    for held in _HELD:
        with suppress(OSError):
            held.restore()


@contextmanager
def holding(gpu: Gpu, folder: Path | None = None) -> Iterator[Held]:
    """Holds the settings of `gpu` in the block, and restores them after it: also on SIGTERM, SIGHUP and at the process's exit.

    What is set is noted in a file of `folder` (default: the user's cache) before it is set, and the process holds a lock beside
    it: `restore_left` finds what a killed process has left. Raises MachineError when another living process holds this GPU.
    """
    folder = folder or notes_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{gpu.uuid}.json"
    file = _locked(path)
    if file is None:
        raise MachineError(
            f"another process holds the clocks of {gpu.uuid}",
            fix="wait until it ends, or run without --clock: two settings of one device cannot both hold",
        )
    with file:
        if path.exists():
            _restore_noted(gpu, path)
        held = Held(gpu, path, file)
        _HELD.append(held)
        atexit.register(held.restore)
        before = _on_signals(held.restore)
        try:
            yield held
        finally:
            try:
                held.restore()
            except OSError as error:  # the work is done: it must not be lost with what cannot be restored
                warnings.warn(
                    f"the clocks of {gpu.uuid} cannot be restored: {error}; nvidia-smi -rgc does", stacklevel=3
                )
            _HELD.remove(held)
            for number, handler in before.items():
                signal.signal(number, handler)
            atexit.unregister(held.restore)


def restore_left(open_uuid: Callable[[str], Gpu], folder: Path | None = None) -> list[str]:
    """Restores the GPUs whose holder was killed; returns a line for each, to be said. `open_uuid` opens a GPU by its UUID.

    A note whose holder lives is left alone, and one that cannot be undone stays, with the reason in its line.
    """
    said = []
    folder = folder or notes_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        file = _locked(path)
        if file is None:
            continue
        with file:
            try:
                _restore_noted(open_uuid(path.stem), path)
                said.append(f"the clocks of {path.stem}, which a killed process had set, are restored")
            except OSError as error:
                said.append(f"the clocks of {path.stem}, which a killed process had set, cannot be restored: {error}")
    return said


def notes_folder() -> Path:
    """The folder of the notes, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "clocks"


def _locked(path: Path) -> IO[str] | None:
    """An open file beside `path`, locked by this process; None when another process has the lock."""
    file = open(path.with_suffix(".lock"), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _restore_noted(gpu: Gpu, path: Path) -> None:
    """Undoes what the note in `path` says, and removes it. A note cut off by a full disk says nothing of a power limit."""
    try:
        watts = json.loads(path.read_text(encoding="utf8"))["limit_before_w"]
    except (ValueError, KeyError):
        watts = None
    _undo(gpu, watts, changed=None)
    path.unlink(missing_ok=True)


def _undo(gpu: Gpu, watts: float | None, changed: Setting | None) -> None:
    """Ends a lock of `gpu`'s clock and sets its limit to `watts`. `changed`: what is set; None: not known, so all of it."""
    if changed is None or changed.sm_mhz is not None:
        gpu.reset_clocks()
    if watts is not None:
        gpu.set_limit_w(watts)


def _on_signals(restore: Callable[[], None]) -> dict[int, Any]:
    """Has `restore` called by signals that would end this process at once; returns the handlers before.

    A process that handles or ignores a signal ends by itself, through the block's end. In another thread none can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def ended(number: int, _: FrameType | None) -> None:
        with suppress(OSError):
            restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ends = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    return {number: signal.signal(number, ended) for number in ends}
