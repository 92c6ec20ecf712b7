"""What is in a folder's files: the identity of a foreign one, and which file of an artifact changed since it was made."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.base.durable import sha256
from hone.base.spec import fingerprint


def changed_file(folder: Path, files: dict[str, Any], manifest: Path) -> str | None:
    """The first of `files` (name to its recorded `bytes` and `sha256`) that is gone or no longer what `manifest` says.

    Costs a look at sizes and times: a manifest is written after its files, so only one that is newer is read again, as
    after an edit or a plain copy of the folder. When such files prove the same, `manifest` is dated after them, which
    spares the next look the reading. An edit that restores size and time escapes; `Artifact.verify` reads everything.
    """
    made = manifest.stat()
    newest = made.st_mtime_ns
    for name, row in files.items():
        path = folder / name
        try:
            found = path.stat()
        except OSError:
            return name
        if not isinstance(row, dict) or found.st_size != row.get("bytes"):
            return name
        if found.st_mtime_ns > made.st_mtime_ns:
            if sha256(path) != row.get("sha256"):
                return name
            newest = max(newest, found.st_mtime_ns)
    if newest > made.st_mtime_ns:
        with suppress(OSError):  # a folder that may only be read
            os.utime(manifest, ns=(made.st_atime_ns, newest))
    return None


def foreign_fingerprint(folder: Path) -> str:
    """Identity of a folder hone did not make: names and sizes of all files, content of the small ones, ends of the large."""
    rows = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
            if size > 2 << 20:
                file.seek(-(1 << 20), os.SEEK_END)
                digest.update(file.read())
            elif size > 1 << 20:
                digest.update(file.read())
        rows[path.relative_to(folder).as_posix()] = [size, digest.hexdigest()]
    return fingerprint(rows)
