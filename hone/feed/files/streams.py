"""Streams: a file's bytes, local or remote, decompressed; detects truncated streams and decompression bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

from hone.base.errors import MissingExtra
from hone.feed.files.listing import File
from hone.feed.files.remote import open_remote

MAX_EXPANSION = 250
"""Text shrinks to a tenth, logs to a fiftieth; what expands more is a decompression bomb."""
MAX_FILE_BYTES = 64 << 20
"""Pages, source files, notebooks and messages are read whole; larger ones are set aside."""
_XZ_BYTES = 1 << 30
"""Memory of an xz stream's dictionary; the highest preset (`xz -9`) needs 65 MB."""
FREE_BYTES = 256 << 20
"""Bytes that a stream may decompress to before its expansion is checked."""


class Unreadable(Exception):
    """Ends the reading of one file: (reason, excerpt)."""


def open_raw(file: File) -> IO[bytes]:
    """The file's bytes as stored, seekable."""
    if file.held is not None:
        return file.held()
    return open_remote(file.url) if file.url else open(file.path, "rb")


def open_stream(file: File) -> io.BufferedReader:
    """The file's bytes, decompressed.

    A truncated stream raises EOFError at its end, one that expands too much raises Unreadable.
    """
    raw = open_raw(file)
    if not file.compression:
        return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[arg-type]
    return io.BufferedReader(_Bounded(_DECOMPRESSORS[file.compression](raw), raw), 1 << 20)


def read_whole(file: File, most: int = MAX_FILE_BYTES) -> bytes:
    """All of the file's bytes, decompressed. Raises Unreadable for more than `most`."""
    with open_stream(file) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise Unreadable("too_large", f"more than {most >> 20} MB")
    return raw


def head(file: File, num_bytes: int) -> bytes:
    """The decompressed form of the first `num_bytes` of the file. Raises OSError, zlib.error or zstandard's ZstdError."""
    with open_raw(file) as raw:
        rest = raw.read(num_bytes)
    if not file.compression:
        return rest
    content = b""
    most = max(MAX_EXPANSION * num_bytes, 1 << 20)
    while rest and len(content) < most:  # one gzip member or zstd frame after the other
        part = _new(file.compression)
        try:
            content += part.decompress(rest, *([] if file.compression == ".zst" else [most - len(content)]))
        except (OSError, lzma.LZMAError) as error:
            raise zlib.error(str(error)) from None
        rest = part.unused_data if part.eof else b""
    return content


def zstandard() -> Any:
    """The module zstandard. Raises MissingExtra without it."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.of("reading .zst files", "zstandard", "data") from None
    return zstandard


def decompressor() -> Any:
    """A decompressor of zstd frames with windows of any length (`--long=31`)."""
    return zstandard().ZstdDecompressor(max_window_size=1 << 31)


def _new(compression: str) -> Any:
    """A decompressor of one gzip member, zstd frame, bzip2 or xz stream."""
    if compression == ".gz":
        return zlib.decompressobj(31)
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        return lzma.LZMADecompressor(memlimit=_XZ_BYTES)
    return decompressor().decompressobj()


class Salvage:
    """Reads everything before the place where a stream is truncated, and only then raises EOFError.

    Of a damaged stream, the data of the current read are lost: decompressors detect some errors late.
    """

    _STEP = 1 << 16

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._error: EOFError | None = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only before the end or truncation; b'' at the end."""
        parts = []
        while size and self._error is None:
            try:
                part = self._stream.read1(min(size, self._STEP))
            except EOFError as error:
                self._error = error
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        if self._error and not parts:
            raise self._error
        return b"".join(parts)


class _Bounded(io.RawIOBase):
    """Reads `content`, which decompresses `raw`, as long as it is in proportion to the bytes read of `raw`."""

    def __init__(self, content: Any, raw: IO[bytes]) -> None:
        self._content, self._raw = content, raw
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        """Decompressed bytes returned so far, which fastwarc calls."""
        return self._position

    def close(self) -> None:
        self._content.close()
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        # One step of the decompressor: in a longer read, gzip would lose its data when a later step fails.
        count = self._content.readinto1(buffer)
        self._position += count
        if self._position > FREE_BYTES and self._position > MAX_EXPANSION * self._raw.tell():
            raise Unreadable("expands_too_much", f"{self._raw.tell()} bytes expanded to {self._position} so far")
        return count


class _Blocks:
    """Reads concatenated bzip2 or xz streams; detects a missing end."""

    _FEED = 1 << 16

    def __init__(self, raw: IO[bytes], new: Callable[[], Any]) -> None:
        self._raw, self._new = raw, new
        self._part = new()
        self._begun = False

    def close(self) -> None:
        self._part = None

    def readinto1(self, buffer: Any) -> int:
        """Fills `buffer` with the available bytes, at least one before the end. Raises EOFError, zlib.error."""
        rest = b""
        while True:
            if self._part.eof:
                rest = self._part.unused_data
                self._part, self._begun = self._new(), False
            if not self._begun:
                rest = rest.lstrip(b"\0")  # the padding between xz streams
            if not rest and self._part.needs_input:
                rest = self._raw.read(self._FEED)
                if not rest:
                    if self._begun:
                        raise EOFError("the compressed stream is truncated")
                    return 0
                if not self._begun and not (rest := rest.lstrip(b"\0")):
                    continue
            self._begun = True
            try:
                ready = self._part.decompress(rest, len(buffer))
            except (OSError, lzma.LZMAError) as error:
                raise zlib.error(str(error)) from None
            rest = b""
            if ready:
                buffer[: len(ready)] = ready
                return len(ready)


class _Zstd:
    """Reads concatenated zstd frames; unlike the library's own reader it detects a missing end."""

    _FEED = 1 << 14  # one feed returns all of its content: small ones bound the memory

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._new = decompressor().decompressobj
        self._frame = self._new()
        self._begun = False
        self._ready = memoryview(b"")

    def close(self) -> None:
        self._ready = memoryview(b"")

    def readinto1(self, buffer: Any) -> int:
        """Fills `buffer` with the available bytes, at least one before the end. Raises EOFError for a truncated stream."""
        while not self._ready:
            rest = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._new(), False
            chunk = rest or self._raw.read(self._FEED)
            if not chunk:
                if self._begun:
                    raise EOFError("the compressed stream is truncated")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(chunk))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


_DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": _Zstd,
    ".bz2": lambda raw: _Blocks(raw, lambda: _new(".bz2")),
    ".xz": lambda raw: _Blocks(raw, lambda: _new(".xz")),
}
