"""Read: files to documents; what is broken is handed on with its reason and never stops the rest."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import tokenize
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from hone.base.errors import HoneError, MissingExtra
from hone.data.readers.docstrings import prose_of
from hone.data.readers.listing import File
from hone.data.readers.web import html_to_text, read_warc
from hone.data.signals import normalize

END_OF_TEXT = "<|endoftext|>"
"""Parts documents in text files (a common dump format) and closes each one in the packed tokens."""
MAX_ROW_BYTES = 64 << 20
_SAMPLE_CHARS = 400


class Document(NamedTuple):
    """One text. `id` is a hash of the file's name and the document's number in it; `kind` is 'prose' or 'code'.

    Documents of one `family` (uint64) must stay in one split: a module's docstrings are in its source too.
    """

    id: str
    text: str
    source: str
    group: str
    kind: str
    family: int


class Broken(NamedTuple):
    """Something that could not become a document, and why."""

    reason: str
    source: str
    text: str
    num_bytes: int


class Options(NamedTuple):
    """How to read: the field that holds the text of JSON rows and Parquet tables; encoding and longest part of text files."""

    text_field: str = "text"
    encoding: str = "utf-8"
    max_document_chars: int = 400_000


class _Unreadable(Exception):
    """Ends one file early: (reason, what to show of it)."""


def read_file(file: File, options: Options) -> Iterator[Document | Broken]:
    """Every document of `file`, and a Broken for everything in it that is none.

    Raises MissingExtra when a package is needed that is not installed; nothing else.
    """
    read = _READERS[file.format]
    number = 0
    found = False
    items = read(file, options)
    while True:
        try:
            item = next(items, None)
        except _Unreadable as stop:
            reason, shown = stop.args
            yield Broken(reason, file.name, shown[:_SAMPLE_CHARS], file.size)
            return
        except BaseException as error:
            if not poisoned(error):
                raise
            yield Broken(_reason(error), file.name, str(error)[:_SAMPLE_CHARS], file.size)
            return
        if item is None:
            if not found:
                yield Broken("empty", file.name, "", file.size)
            return
        found = True
        kind, text = item
        if kind == "broken":
            reason, _, sample = text.partition("\n")
            yield Broken(reason, file.name, sample[:_SAMPLE_CHARS], len(sample.encode("utf8", "replace")))
            continue
        yield _document(text, kind, file, number)
        number += 1


def poisoned(error: BaseException) -> bool:
    """Whether `error` came from the input, so that the document or file is set aside and the rest goes on.

    A panic of a library in Rust arrives as a BaseException that is no Exception.
    """
    if isinstance(error, HoneError | MemoryError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _document(text: str, kind: str, file: File, number: int) -> Document | Broken:
    """The document itself, or why its text is none."""
    size = len(text.encode("utf8", "replace"))
    if "\0" in text:
        return Broken("binary", file.name, text[:_SAMPLE_CHARS].replace("\0", "\\0"), size)
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return Broken("lone_surrogate", file.name, text[:_SAMPLE_CHARS].encode("utf8", "replace").decode(), size)
    text = normalize(text)
    if not text.strip():
        return Broken("empty", file.name, "", size)
    ident = _hash(f"{file.name}#{number}")
    family = _hash(file.name) if file.format == "python" else ident
    return Document(ident, text, file.name, _group(file, kind), kind, int(family, 16))


def _hash(text: str) -> str:
    """Sixteen hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _group(file: File, kind: str) -> str:
    """What a file is counted under in statistics: sort of library text, top folder, or the file itself."""
    if file.format == "python":
        return "library sources" if kind == "code" else "library docstrings"
    top, slash, _ = file.name.partition("/")
    return top + slash


def _reason(error: Exception) -> str:
    """One word for what went wrong in a file."""
    if isinstance(error, PermissionError):
        return "no_permission"
    if isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, UnicodeError):
        return "wrong_encoding"
    if isinstance(error, gzip.BadGzipFile | zlib.error) or type(error).__name__ == "ZstdError":
        return "bad_compression"
    if isinstance(error, OSError):
        return "unreadable"
    return f"failed_{type(error).__name__}"


def _open(file: File) -> IO[bytes]:
    """The file's bytes, decompressed. A stream that breaks off raises EOFError when its end is reached."""
    if file.compression == ".gz":
        return gzip.open(file.path, "rb")  # type: ignore[return-value]
    raw = open(file.path, "rb")
    return io.BufferedReader(_Zstd(raw), 1 << 20) if file.compression == ".zst" else raw


def head(file: File, num_bytes: int) -> bytes:
    """What the first `num_bytes` of the file decompress to. Raises OSError, zlib.error or zstandard's ZstdError."""
    with open(file.path, "rb") as raw:
        rest = raw.read(num_bytes)
    if not file.compression:
        return rest
    content = b""
    while rest:  # one gzip member or zstd frame after the other
        part = zlib.decompressobj(31) if file.compression == ".gz" else _zstandard().ZstdDecompressor().decompressobj()
        content += part.decompress(rest)
        rest = part.unused_data if part.eof else b""
    return content


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.of("reading .zst files", "zstandard", "data") from None
    return zstandard


class _Zstd(io.RawIOBase):
    """Reads concatenated zstd frames; unlike the library's own reader it notices a missing end."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._new = _zstandard().ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new()
        self._begun = False
        self._ready = b""
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        """Decompressed bytes handed out; fastwarc asks."""
        return self._position

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._new(), False
            chunk = rest or self._raw.read(1 << 17)
            if not chunk:
                if self._begun:
                    raise EOFError("the compressed stream breaks off")
                return 0
            self._begun = True
            self._ready = self._frame.decompress(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._position += count
        return count


def _read_text(file: File, options: Options) -> Iterator[tuple[str, str]]:
    """Documents parted by END_OF_TEXT; a longer one than `max_document_chars` is cut, at a blank line if it can be."""
    most = options.max_document_chars
    with _open(file) as raw:
        buffered = raw if isinstance(raw, io.BufferedReader | gzip.GzipFile) else io.BufferedReader(raw)
        start = buffered.peek(4)[:4]
        encoding = options.encoding
        if start.startswith(codecs.BOM_UTF8):
            encoding = "utf-8-sig"
        elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16"
        waiting = ""
        stream = io.TextIOWrapper(buffered, encoding=encoding, newline=None)
        while chunk := stream.read(1 << 20):
            *whole, waiting = (waiting + chunk).split(END_OF_TEXT)
            for text in whole:
                for part in _parts(text, most):
                    yield "prose", part
            while len(waiting) > most:
                part, waiting = _cut(waiting, most)
                yield "prose", part
        if waiting.strip():
            yield "prose", waiting


def _parts(text: str, most: int) -> Iterator[str]:
    """`text` cut into documents; nothing for blank text."""
    while len(text) > most:
        part, text = _cut(text, most)
        yield part
    if text.strip():
        yield text


def _cut(text: str, most: int) -> tuple[str, str]:
    """(a beginning of at most `most` characters, the rest), cut at the last blank line, line end or space in its last half."""
    for border in ("\n\n", "\n", " "):
        place = text.rfind(border, most // 2, most)
        if place >= 0:
            return text[:place], text[place + len(border) :]
    return text[:most], text[most:]


def _read_code(file: File, options: Options) -> Iterator[tuple[str, str]]:
    yield "code", _source(file)


def _read_python(file: File, options: Options) -> Iterator[tuple[str, str]]:
    """A module of the Python library: its prose, then its source."""
    source = _source(file)
    for text in prose_of(source, file.name):
        yield "prose", text
    if not file.name.endswith("pydoc_data/topics.py"):
        yield "code", source


def _source(file: File) -> str:
    """Python source in the encoding it declares (PEP 263)."""
    raw = _whole(file)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    except SyntaxError:
        raise _Unreadable("wrong_encoding", "") from None
    return raw.decode(encoding)


def _read_html(file: File, options: Options) -> Iterator[tuple[str, str]]:
    yield "prose", html_to_text(_whole(file))


def _whole(file: File) -> bytes:
    with _open(file) as stream:
        raw = stream.read(MAX_ROW_BYTES + 1)
    if len(raw) > MAX_ROW_BYTES:
        raise _Unreadable("too_large", "")
    return raw


def _read_jsonl(file: File, options: Options) -> Iterator[tuple[str, str]]:
    with _open(file) as stream:
        while line := stream.readline(MAX_ROW_BYTES):
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield "broken", "row_too_long"
            elif line.strip():
                yield _row(line, options.text_field)


def _row(line: bytes, text_field: str) -> tuple[str, str]:
    shown = "\n" + line[:_SAMPLE_CHARS].decode("utf8", "replace").rstrip()
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "broken", "wrong_encoding" + shown
    except (ValueError, RecursionError):
        return "broken", "bad_json" + shown
    text = row.get(text_field) if isinstance(row, dict) else None
    return ("prose", text) if isinstance(text, str) else ("broken", "no_text_field" + shown)


def _read_parquet(file: File, options: Options) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra.of("reading Parquet", "pyarrow", "data") from None
    try:
        with parquet.ParquetFile(file.path) as table:
            if options.text_field not in table.schema_arrow.names:
                raise _Unreadable("no_text_field", f"columns: {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(batch_size=256, columns=[options.text_field]):
                for text in batch.column(0).to_pylist():
                    yield ("prose", text) if isinstance(text, str) else ("broken", "no_text_field")
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _Unreadable("bad_parquet", str(error)) from None


def _read_warc(file: File, options: Options) -> Iterator[tuple[str, str]]:
    # fastwarc finds gzip members itself; only zstd frames are opened for it.
    with open(file.path, "rb") if file.compression == ".gz" else _open(file) as stream:
        for kind, text in read_warc(stream):
            yield ("prose", text) if kind == "text" else (kind, text)


_READERS: dict[str, Callable[[File, Options], Iterator[tuple[str, str]]]] = {
    "text": _read_text,
    "code": _read_code,
    "python": _read_python,
    "html": _read_html,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "warc": _read_warc,
}
