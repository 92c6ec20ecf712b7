"""The GGUF container: header, metadata and tensor table, whose size is known before the first block is computed.

Source: ggml-org/ggml, docs/gguf.md (version 3, little-endian).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hone.base.durable import NO_SPACE, sync
from hone.base.errors import ArtifactError, FitError
from hone.base.figure import human_bytes
from hone.base.partial import is_at
from hone.exports.base import need_free
from hone.exports.gguf.formats import Format

ALIGNMENT = 32
"""Every tensor begins at a multiple of it: the default, so that general.alignment is left out."""

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: a matrix of `rows` x `columns`, or a vector of `rows` (columns 0)."""

    name: str
    rows: int
    columns: int
    form: Format

    @property
    def num_bytes(self) -> int:
        """Its bytes, without the padding behind it."""
        return self.form.num_bytes(self.rows, self.columns) if self.columns else self.form.num_bytes(1, self.rows)


def header(metadata: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
    """Everything before the first tensor, padded. Values are bool, int (uint32), float (float32), str, or lists of one of
    these (integers then as int32)."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _typed(value)]
    offset = 0
    for entry in entries:
        shape = (entry.columns, entry.rows) if entry.columns else (entry.rows,)  # the fastest dimension first
        parts.append(_text(entry.name))
        parts.append(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, entry.form.number, offset))
        offset += _padded(entry.num_bytes)
    plain = b"".join(parts)
    return plain.ljust(_padded(len(plain)), b"\0")


def file_bytes(head: bytes, entries: Iterable[Entry]) -> int:
    """Exact size of the file."""
    return len(head) + sum(_padded(entry.num_bytes) for entry in entries)


def write(
    path: Path, head: bytes, entries: Sequence[Entry], contents: Iterator[Iterable[bytes]], *, replace: bool = False
) -> None:
    """Writes `path` atomically: beside it as PATH.partial, renamed when whole. `contents` are the pieces of each tensor.

    Raises FitError when the disk has or gets too little space, ArtifactError when another process writes the same file, or it
    exists and is not to be replaced.
    """
    size = file_bytes(head, entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(path, replace) as file:
            free = shutil.disk_usage(path.parent).free
            if free < size:
                raise FitError(
                    f"{path} needs {human_bytes(size)}, the disk has {human_bytes(free)}",
                    fix="free disk space, or choose a smaller type",
                )
            file.write(head)
            for entry, pieces in zip(entries, contents, strict=True):
                begin = file.tell()
                for piece in pieces:
                    file.write(piece)
                assert file.tell() - begin == entry.num_bytes, f"{entry.name}: {file.tell() - begin} bytes were written"
                file.write(bytes(_padded(entry.num_bytes) - entry.num_bytes))
            assert file.tell() == size, f"{file.tell()} bytes were written, {size} planned"
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise FitError(
            f"{NO_SPACE[error.errno]} for {path} of {human_bytes(size)}",
            fix="free disk space, write where there is more, or choose a smaller type",
        ) from None
    sync(path.parent)


@contextmanager
def _opened(path: Path, replace: bool) -> Iterator[BinaryIO]:
    """PATH.partial, empty and locked; renamed to `path` at the end of the block, removed when that fails."""
    partial = path.with_name(path.name + ".partial")
    with _locked(partial, path) as file:
        try:
            if not replace:  # under the lock, for another process may have finished it since the work began
                need_free(path)
            file.seek(0)
            file.truncate()  # frees the space of what a killed process left
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _locked(partial: Path, path: Path) -> BinaryIO:
    """The file `partial`, open at its end and locked. Raises ArtifactError when another process has the lock."""
    while True:
        file = open(partial, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ArtifactError(f"another process is writing {path}", fix="wait for it, or give another file") from None
        if is_at(file, partial):
            return file
        file.close()  # another process has renamed or removed it since it was opened


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    encoded = value.encode(errors="replace")  # names of files may be no text
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, list):
        kind = (
            _INT32
            if value and isinstance(value[0], int)
            else _FLOAT32
            if value and isinstance(value[0], float)
            else _STRING
        )
        if kind == _STRING:
            items = b"".join(map(_text, value))
        else:
            items = struct.pack(f"<{len(value)}{'i' if kind == _INT32 else 'f'}", *value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    kind, code = (
        (_BOOL, "?") if isinstance(value, bool) else (_UINT32, "I") if isinstance(value, int) else (_FLOAT32, "f")
    )
    return struct.pack(f"<I{code}", kind, value)
