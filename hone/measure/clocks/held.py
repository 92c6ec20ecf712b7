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
        self._pid = os.getpid()

    def set(self, setting: Setting) -> None:
        """Sets `setting` instead of the one before. Raises NvmlError when it is refused; then nothing is changed."""
        with self._lock:
            if setting == self.now:
                return
            if self._before_w is None and setting.limit_w is not None:
                self._before_w = self.gpu.limits_w()[2]
            self._note(setting)  # before it is set: a process may be killed between the two
            try:
                self._change(setting)
            except NvmlError:
                if self.now == FULL:
                    self._path.unlink(missing_ok=True)
                raise
            self.now = setting

    def _change(self, setting: Setting) -> None:
        if setting.limit_w != self.now.limit_w:
            self.gpu.set_limit_w(self._before_w if setting.limit_w is None else setting.limit_w)  # type: ignore[arg-type]
        if setting.sm_mhz != self.now.sm_mhz:
            try:
                self._lock_clock(setting.sm_mhz)
            except NvmlError:
                if setting.limit_w != self.now.limit_w and self._before_w is not None:
                    self.gpu.set_limit_w(self.now.limit_w or self._before_w)
                raise

    def _lock_clock(self, mhz: int | None) -> None:
        if mhz is None:
            self.gpu.reset_clocks()
        else:
            self.gpu.lock_clocks(mhz)

    def _note(self, setting: Setting) -> None:
        """Notes what this process may have set when it is killed: what is set now, or `setting`."""
        row = {"uuid": self.gpu.uuid, "pid": self._pid, "boot": _boot(), "limit_before_w": self._before_w}
        row |= {"set": [self.now, setting]}
        write_atomic(self._path, json.dumps(row).encode())

    def restore(self) -> None:
        """Ends this process's lock of the clock, gives back the power limit that was there before, and forgets the note of them.

        What this process has not set it leaves alone; a fork of it (a worker that is ended by SIGTERM) restores nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self.now == FULL:
                self._path.unlink(missing_ok=True)
                return
            if self.now.sm_mhz is not None:
                self.gpu.reset_clocks()
            if self.now.limit_w is not None and self._before_w is not None:
                self.gpu.set_limit_w(self._before_w)
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
    it: `restore_left` finds what a killed process has left. Raises MachineError when another living process holds this GPU, or
    when nothing can be written in `folder`.
    """
    folder = folder or notes_folder()
    path = folder / f"{gpu.uuid}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
    except OSError as error:
        raise MachineError(
            f"the clocks of {gpu.uuid} are not set: what is set must be noted in {folder} first, which is not writable ({error.strerror})",
            fix="set XDG_CACHE_HOME to a folder that you may write in, or run without --clock",
        ) from None
    if file is None:
        raise MachineError(
            f"another process holds the clocks of {gpu.uuid}",
            fix="wait until it ends, or run without --clock: two settings of one device cannot both hold",
        )
    with file:
        if path.exists():
            with suppress(OSError):  # refused: what this process sets will be, too, which is said
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

    A note whose holder lives is left alone, and one that cannot be undone stays, with the reason in its line. A clock or a limit that
    is another one now than was set is somebody else's and stays as it is, and so does all after a reboot, which ends every setting.
    """
    said = []
    folder = folder or notes_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            file = _locked(path)
        except OSError as error:
            said.append(f"the clocks of {path.stem}, which another process had set, cannot be looked at: {error}")
            continue
        if file is None:
            continue
        with file:
            try:
                undone = _restore_noted(open_uuid(path.stem), path)
                if undone:
                    said.append(f"the {undone} of {path.stem}, which a killed process had set, {_IS[undone]} restored")
                elif path.exists():
                    said.append(
                        f"a killed process had set the clock of {path.stem}, which is lower now: an idle GPU's, or somebody else's, so it "
                        f"is left; nvidia-smi -rgc ends a lock, rm {path} this note"
                    )
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


def _restore_noted(gpu: Gpu, path: Path) -> str:
    """Undoes what the note in `path` says where it is still so, and returns what that was, a key of `_IS`; '' for nothing.

    The note is removed, save where the clock is lower than was set: NVML shows no lock, and an idle GPU may lower its clock below it.
    """
    try:
        row = json.loads(path.read_text(encoding="utf8"))
        settings, before_w, boot = [Setting(*one) for one in row["set"]], row["limit_before_w"], row["boot"]
    except (ValueError, KeyError, TypeError):  # cut off, or of another version: nobody knows what was set
        settings, before_w, boot = [], None, None
    if boot != _boot():
        settings = []
    undone, stays = [], False
    clocks = [one.sm_mhz for one in settings if one.sm_mhz is not None]
    if clocks:
        now = gpu.clocks_mhz()[0]
        if any(abs(now - mhz) <= _STEP_MHZ for mhz in clocks):
            gpu.reset_clocks()
            undone.append("clocks")
        else:
            stays = now < min(clocks)
    limits = [one.limit_w for one in settings if one.limit_w is not None]
    if limits and before_w is not None and any(abs(gpu.limits_w()[2] - watts) < 1 for watts in limits):
        gpu.set_limit_w(before_w)
        undone.append("power limit")
    if not stays:
        path.unlink(missing_ok=True)
    return " and ".join(undone)


_STEP_MHZ = 15
"""Between neighbouring clocks of a GPU."""
_IS = {"clocks": "are", "power limit": "is", "clocks and power limit": "are"}


def _boot() -> str:
    """The kernel's name of this boot: no setting of a GPU outlives it. '' where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


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
