"""Containers: the members of zip and tar files, each read like a file of its own; nothing is written under a member's name."""

from __future__ import annotations

import errno
import io
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hone.feed.files.kinds import CONTAINERS, ending_of, kind_of
from hone.feed.files.listing import File
from hone.feed.files.streams import FREE_BYTES, MAX_EXPANSION, Unreadable, open_raw, open_stream
from hone.readers.documents import Fault, Noted, Options

MAX_DEPTH = 3
"""Containers inside of containers."""
_IN_MEMORY = 32 << 20
_STEP = 1 << 20
_BLOCK = 512
_DOCUMENTS = {"word/document.xml": "docx"}
_MIMETYPES = {b"application/epub+zip": "epub", b"application/vnd.oasis.opendocument.text": "odt"}


def read_container(file: File, options: Options) -> Iterator[File | Fault | Noted]:
    """The members of a zip or tar file as files to read, in their order; members of other kinds are noted.

    A member's name is NAME_OF_THE_CONTAINER/NAME_IN_IT. Each must be read before the next is requested. Of a truncated tar the
    members before the end are returned, then EOFError is raised. Raises Unreadable.
    """
    yield from (_zipped if file.format == "zip" else _tarred)(file)


def member_bytes(file: File) -> list[int]:
    """Compressed bytes of each member of a zip file. Raises Unreadable."""
    with open_zip(file) as archive:
        return [one.compress_size for one in archive.infolist()]


def unpacked_bytes(file: File) -> int:
    """Bytes of all members of a zip file, as it declares them. Raises Unreadable."""
    with open_zip(file) as archive:
        return sum(one.file_size for one in archive.infolist())


def document_in(file: File) -> str:
    """'docx', 'epub' or 'odt' for a zip file that is one document, else ''."""
    try:
        with open_zip(file) as archive:
            names = set(archive.namelist())
            if "mimetype" in names:
                with archive.open("mimetype") as stream:
                    return _MIMETYPES.get(stream.read(100).strip(), "")
            return next((format for name, format in _DOCUMENTS.items() if name in names), "")
    except Unreadable:
        return ""


@contextmanager
def open_zip(file: File) -> Iterator[zipfile.ZipFile]:
    """The zip file. Raises Unreadable for an invalid one."""
    try:
        with open_raw(file) as raw, zipfile.ZipFile(raw) as archive:
            yield archive
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise Unreadable("bad_zip", str(error)) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # an offset in the index before the file's beginning
            raise
        raise Unreadable("bad_zip", str(error)) from None


def unpacked(archive: zipfile.ZipFile, name: str | zipfile.ZipInfo, most: int) -> bytes:
    """The content of a member of at most `most` bytes. Raises Unreadable for a larger, encrypted or damaged one, KeyError."""
    info = archive.getinfo(name) if isinstance(name, str) else name
    held = _copied(lambda: archive.open(info), info.compress_size, most)
    with held() as stream:
        return stream.read()


def _zipped(file: File) -> Iterator[File | Fault | Noted]:
    with open_zip(file) as archive:
        members = archive.infolist()
        for info in members[slice(*file.part)] if file.part else members:
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                yield Fault("encrypted", f"{file.name}/{info.filename}", info.file_size)
                continue
            yield from _member(
                file, info.filename, info.file_size, lambda info=info: archive.open(info), info.compress_size
            )


def _tarred(file: File) -> Iterator[File | Fault | Noted]:
    try:
        with open_stream(file) as stream, tarfile.open(fileobj=(ending := _Ending(stream)), mode="r|") as archive:
            for info in archive:
                if info.isdir():
                    continue
                if not info.isreg():
                    yield Noted("(no regular file)")
                    continue
                archive.members = []  # it keeps the header of every member
                yield from _member(file, info.name, info.size, lambda info=info: archive.extractfile(info), info.size)
            if ending.last != bytes(_BLOCK):  # tarfile takes a header that is cut for the end
                raise EOFError("the archive is truncated")
    except tarfile.ReadError as error:
        if "unexpected end" in str(error):
            raise EOFError(str(error)) from None
        raise Unreadable("bad_tar", str(error)) from None
    except tarfile.TarError as error:
        raise Unreadable("bad_tar", str(error)) from None


class _Ending:
    """A stream for tarfile, with the last bytes that were read: those of a whole archive are a block of zeros."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int) -> bytes:
        found = self._stream.read(size)
        self.last = (self.last + found)[-_BLOCK:] if len(found) < _BLOCK else found[-_BLOCK:]
        return found


def _member(file: File, inner: str, size: int, open_: Callable[[], Any], packed: int) -> Iterator[File | Fault | Noted]:
    inner = inner.encode("utf8", "replace").decode()
    inner = "/".join(part for part in inner.split("/") if part not in ("", ".", ".."))
    if any(part.startswith(".") or part == "__MACOSX" for part in inner.split("/")):
        yield Noted("(hidden)")
        return
    kind = kind_of(inner, file.forced)
    if kind is None:
        yield Noted(ending_of(inner))
        return
    name = f"{file.name}/{inner}"
    if kind[0] in CONTAINERS and file.depth + 1 >= MAX_DEPTH:
        yield Fault("nested_too_deeply", f"{name} is in {MAX_DEPTH} containers", size)
        return
    try:
        held = _copied(open_, packed)
    except Unreadable as stop:
        yield Fault(stop.args[0], f"{name}\n{stop.args[1]}", size)
        return
    yield replace(
        file,
        path=Path(inner),
        name=name,
        size=size,
        format=kind[0],
        compression=kind[1],
        url="",
        part=None,
        held=held,
        depth=file.depth + 1,
    )


def _copied(open_: Callable[[], Any], packed: int, most: int | None = None) -> Callable[[], IO[bytes]]:
    """The content of a member of `packed` compressed bytes, in memory or in an unnamed temporary file; opens it again and again.

    Raises Unreadable for a member that is damaged, expands too much, or has more than `most` bytes.
    """
    kept = tempfile.SpooledTemporaryFile(_IN_MEMORY)
    num_bytes = 0
    try:
        with open_() as stream:
            while chunk := stream.read(_STEP):
                kept.write(chunk)
                num_bytes += len(chunk)
                if most is not None and num_bytes > most:
                    raise Unreadable("too_large", "")
                if num_bytes > FREE_BYTES and num_bytes > MAX_EXPANSION * max(packed, 1):
                    raise Unreadable("expands_too_much", f"{packed} bytes expanded to {num_bytes} so far")
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise Unreadable("bad_zip", str(error)) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            raise Unreadable("bad_zip", str(error)) from None
        if type(error).__name__ in ("error", "LZMAError"):
            raise Unreadable("bad_compression", str(error)) from None
        raise
    return lambda: _View(kept)


class _View(io.RawIOBase):
    """A temporary file from its beginning; closing it leaves the file open."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._file.seek(offset + self._place if whence == 1 else offset, 0 if whence == 1 else whence)
        self._place = self._file.tell()
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._place)
        found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)
