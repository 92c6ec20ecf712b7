"""Partial: the folder `<out>.partial` in which an artifact is made: locked by its process, resumed, renamed when whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.base.durable import NO_SPACE, sync
from hone.base.errors import ArtifactError, DriftError, HoneError, MachineError, SpecError
from hone.base.identity import drift, read_both
from hone.base.run import Run
from hone.base.spec import Spec

STATE = "state"
BEGUN = "begun.json"
MISTAKE = f"{STATE}/mistake"
"""The file that says that the work ended with an error of its spec or its inputs: with another spec it begins anew."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # a Path keeps one slash; a single letter would be a drive
PULL = "hone pull URL FOLDER copies it here; then give FOLDER"
PUSH = "give a folder here; hone push FOLDER URL copies it there when it is whole"


def need_local(folder: Path | str, fix: str) -> None:
    """Raises SpecError when `folder` is a URL: stages work in local folders. `fix` is PULL or PUSH."""
    found = _URL.match(str(folder))
    if found:
        url = f"{found[1]}://{str(folder)[found.end() :]}"
        raise SpecError(f"{url} is a URL, but a stage reads and writes folders of this machine", fix=fix)


def partial_of(folder: Path) -> Path:
    """The folder in which `folder` is made."""
    return folder.with_name(folder.name + ".partial")


def take(out: Path) -> Any:
    """The partial folder's lock file, locked: a second process is refused, a killed one leaves no lock."""
    partial = partial_of(out)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = open(partial / BEGUN, "a+", encoding="utf8")
    except FileNotFoundError:
        return take(out)  # another process released the folder in between
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise ArtifactError(
            f"cannot make {partial}: {error.strerror}", fix="give an output folder you may write to"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ArtifactError(
            f"another process is making {out}", fix="wait for it, or give this run another folder"
        ) from None
    if not is_at(lock, partial / BEGUN):  # released by another process between opening and locking
        lock.close()
        return take(out)
    return lock


def is_at(file: Any, path: Path) -> bool:
    """Whether the open `file` is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def resume(out: Path, lock: Any, token: str, run: Run, identity: dict[str, Any], kind: type[Spec] | None) -> bool:
    """Whether the partial folder was started for the same `token`; if not, it is emptied and started for it.

    `kind` is the class of the stage, `identity` its manifest. Work of another spec stays when it is the beginning of this one's
    (`Spec.goes_on`). Raises DriftError when the folder has a stage's work with another spec, unless `run.redo` or that work
    ended with a mistake in its spec; what was pulled can be pulled again.
    """
    partial = partial_of(out)
    lock.seek(0)
    before, _, row = lock.read().partition("\n")
    mistaken = (partial / MISTAKE).exists()
    if before == token and not run.redo:
        (partial / MISTAKE).unlink(missing_ok=True)
        run.say(f"resuming {out.name}")
        return True
    if before and row and not run.redo and not mistaken and _goes_on(json.loads(row), identity, kind, partial, lock):
        # In place and in one write: after a kill the folder is begun for one of the two.
        with open(partial / BEGUN, "r+", encoding="utf8") as begun:
            begun.write(f"{token}\n{json.dumps(identity)}".ljust(os.fstat(lock.fileno()).st_size))
            begun.flush()
            os.fsync(begun.fileno())
        run.say(f"going on with {out.name}, which was begun with another spec")
        return True
    if before and not (before.startswith("pull ") or run.redo or mistaken) and _work_in(partial):
        lock.close()
        change = drift(json.loads(row), identity, kind) if row else ""
        raise DriftError(
            f"{partial} has unfinished work of another spec{change and ': '}{change}",
            fix=f"give that spec again and it resumes, give the new one another name, or drop that work with --redo={out.name}",
        )
    if before:
        run.say(f"{partial} was started and not finished; starting it again")
    for path in partial.iterdir():
        if path.name != BEGUN:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    lock.seek(0)
    lock.truncate()
    lock.write(token if kind is None else f"{token}\n{json.dumps(identity)}")
    lock.flush()
    os.fsync(lock.fileno())
    return False


def _goes_on(before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None, partial: Path, lock: Any) -> bool:
    """Whether the work of `before` in `partial` is the beginning of that of `now`. Raises what `Spec.goes_on` raises."""
    begun, spec = read_both(before, now, kind)
    try:
        return begun is not None and spec is not None and spec.goes_on(begun, partial / STATE)
    except HoneError:
        lock.close()
        raise


def release(partial: Path, lock: Any, error: object = None) -> None:
    """Gives back the lock of work that ended, by `error` if by one; removes the folder when nothing was written yet."""
    if not _work_in(partial) and not lock.closed:
        shutil.rmtree(partial, ignore_errors=True)
    elif isinstance(error, HoneError) and not isinstance(error, MachineError):
        with suppress(OSError):  # a stage may have removed its state; the error under way is the one to show
            (partial / MISTAKE).touch()
    lock.close()


def _work_in(partial: Path) -> bool:
    """Whether a stage has written anything there."""
    return any(path.is_file() and path.name != BEGUN for path in partial.rglob("*"))


def publish(out: Path, lock: Any) -> None:
    """Renames the partial folder, whose files are synced and whose manifest is written, to `out` and releases the lock."""
    partial = partial_of(out)
    for folder in (path for path in partial.rglob("*") if path.is_dir()):
        sync(folder)
    sync(partial)
    os.rename(partial, out)
    sync(out.parent)
    # Last: after a kill before the rename, everything needed to resume must be there.
    sweep(out)
    lock.close()


def sweep(folder: Path) -> None:
    """Removes the files that only an unfinished artifact needs."""
    shutil.rmtree(folder / STATE, ignore_errors=True)
    (folder / BEGUN).unlink(missing_ok=True)
