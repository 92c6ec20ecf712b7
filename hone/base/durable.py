"""Files that survive a kill: atomic writes, JSONL, hashes, syncs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows as JSONL, atomically."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Forces a file or a folder entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
