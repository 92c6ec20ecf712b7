"""A folder for files that are only timed: removed after use, and what a killed process left of it by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".hone-calibrate-"


def here() -> Path:
    """The current folder, below which artifacts are written unless another is named; else the system's for temporary files."""
    current = Path.cwd()
    return current if os.access(current, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def scratch(parent: Path) -> Iterator[Path | None]:
    """A new folder in `parent`, locked by this process until it is removed; None where none can be made, as on a full disk."""
    sweep(parent)
    try:
        folder, lock = _made(parent)
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path) -> None:
    """Removes the folders of `scratch` in `parent` that no living process has locked."""
    with suppress(OSError):  # a folder that cannot be listed holds none of them
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _made(parent: Path) -> tuple[Path, int]:
    """A folder and its lock, an open descriptor. Another process may sweep it between the two: then there is a next one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweep has it, and removes it
            os.close(lock)
            continue
        except OSError:  # a file system without locks, where no sweep removes it either
            pass
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return folder, lock
        os.close(lock)
