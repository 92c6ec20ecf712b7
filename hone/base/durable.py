"""Files: atomic writes that survive a kill, JSONL, hashes, syncs, and checks of files given by the user."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hone.base.errors import SpecError

NO_SPACE = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "no space left (a quota is reached)",
    errno.EFBIG: "no space left (the largest size of a file is reached: 4 GiB on FAT, or ulimit -f)",
}
"""The errors of a disk that takes no more, and what is said of each."""

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` so that a kill leaves either the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; [] when it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf8").split("\n") if line]


def whole_number(text: str) -> int:
    """An integer of a JSON text, for the `parse_int` of `json.loads`. Raises ValueError where it has more than 308 digits:
    hone writes none, and a float64 cannot hold it."""
    digits = len(text.removeprefix("-"))
    if digits > 308:
        raise ValueError(f"a whole number of {digits} digits")
    return int(text)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows as JSONL, atomically."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """The same, cached until the file changes, because many tasks read the same files."""
    there = path.stat()
    return _sha256_of(path, there.st_size, there.st_mtime_ns, there.st_ino)


@functools.lru_cache(maxsize=65536)
def _sha256_of(path: Path, *version: int) -> str:
    return sha256(path)


def sync(path: Path) -> None:
    """Forces a file or a folder entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kind_of(path: Path) -> str:
    """What is at `path` instead of a regular file, such as 'a folder'; '' for a regular file. Raises OSError."""
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "")


def input_file(path: Path | str, field: str) -> Path:
    """`path` with '~' expanded. Raises SpecError, which names `field`, unless it is a regular file."""
    path = Path(path).expanduser()
    try:
        kind = kind_of(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"{field}: no file {path}", fix="check the path") from None
    except OSError as error:  # no permission, a link to itself, a name that is too long
        raise SpecError(f"{field}: {path} cannot be opened: {error.strerror}", fix="check the path") from None
    if kind:
        raise SpecError(
            f"{field}: {path} is {kind}, not a file", fix="give a file; write a pipe's output to a file first"
        )
    return path
