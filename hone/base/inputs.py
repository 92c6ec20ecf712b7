"""Inputs: the files that a user names, refused with a sentence where opening them would fail or wait for ever."""

from __future__ import annotations

import stat
from pathlib import Path

from hone.base.errors import SpecError

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def kind_of(path: Path) -> str:
    """What stands at `path` instead of a regular file, as 'a folder'; '' for a regular file. Raises OSError."""
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "")


def input_file(path: Path | str, field: str) -> Path:
    """`path` with '~' expanded. Raises SpecError, which names `field`, unless it is a regular file."""
    path = Path(path).expanduser()
    try:
        kind = kind_of(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"{field}: no file {path}", fix="check the path") from None
    except OSError as error:  # no permission, a link that leads to itself, a name that is too long
        raise SpecError(f"{field}: {path} cannot be opened: {error.strerror}", fix="check the path") from None
    if kind:
        raise SpecError(
            f"{field}: {path} is {kind}, not a file", fix="name a file; write what a pipe gives to one first"
        )
    return path
