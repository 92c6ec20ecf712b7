"""Archives: the pages of WARC, WET and ARC files; a damaged record is set aside and reading continues at the next one."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any

from hone.base.errors import HoneError, MissingExtra
from hone.feed.files.listing import File
from hone.feed.files.remote import is_lost
from hone.feed.files.streams import Unreadable, decompressor, head, open_raw, open_stream, zstandard
from hone.readers.documents import Fault, Noted, Options, RawText, poisoned
from hone.readers.encodings import decode_plain
from hone.readers.pages import Extractor, Fast, page_text

MAX_RECORD_BYTES = 32 << 20
"""Larger web records are not pages."""
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_NO_PAGES = ("dns:", "whois:", "metadata:")
_TYPE = re.compile(r"[\w.+-]{1,40}/[\w.+-]{1,80}")
_MEMBER = b"\x1f\x8b\x08"
_RECORD = re.compile(rb"(?<=\n)WARC/1\.\d\r?\n")
_STEP = 1 << 20
_LONGEST_HEADER = 1 << 16


def read_archive(file: File, options: Options) -> Iterator[RawText | Fault | Noted]:
    """The text of each page in a WARC or ARC file and of each record of a WET file; a Fault for what cannot be read.

    Requests, metadata, other content types and responses with a status other than 200 are noted as what they are.
    Raises MissingExtra without fastwarc (WARC) or the extractor's package.
    """
    extractor = options.extractor or Fast()
    start = _starts(file)
    quirks = start.startswith(b"WARC/0")
    if start.startswith(b"filedesc:"):
        with open_stream(file) as stream:
            yield from read_arc(stream, extractor)
    elif file.compression == ".zst":
        with open_stream(file) as stream:
            yield from _warc(stream, extractor, None, quirks)
    else:  # fastwarc detects gzip members itself
        with open_raw(file) as stream:
            yield from _warc(stream, extractor, file.compression, quirks)


def _starts(file: File) -> bytes:
    """The file's first bytes; none when they are damaged, because what follows may be whole."""
    try:
        return head(file, 1 << 12)
    except Exception as error:
        if isinstance(error, zlib.error) or type(error).__name__ == "ZstdError":
            return b""
        raise


def _warc(
    stream: IO[bytes], extractor: Extractor, compression: str | None, quirks: bool
) -> Iterator[RawText | Fault | Noted]:
    """Records of a WARC stream. With `compression` '' or '.gz' of a seekable stream, reading continues at the next record after damage.

    `quirks`: accepts malformed headers like those of WARC 0.18, which also hides damage.
    """
    try:
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise MissingExtra.of("reading WARC files", "fastwarc", "data") from None
    wanted = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
    start = 0
    damage: Fault | None = None  # reported when its end is known
    found = False
    while True:
        last = start
        held: list[RawText | Fault | Noted] = []  # of the previous record, which may be the last and incomplete
        try:
            if start:
                stream.seek(start)
            every = WarcRecordType.any_type
            for record in ArchiveIterator(stream, record_types=every, parse_http=True, quirks_mode=quirks):
                yield from ([damage] if damage else []) + held
                damage, held, found = None, [], True
                last = max(last, record.stream_pos)
                if not record.record_type & wanted:
                    held = [Noted(f"WARC {_word(record.headers.get('WARC-Type', ''))}")]
                else:
                    held = list(_record(record, extractor, is_text=record.record_type == WarcRecordType.conversion))
            cut = any(isinstance(item, Fault) and item.reason == "truncated" for item in held)
            if found and (cut or (compression is not None and _breaks_off(stream, last, compression))):
                held = []
                raise EOFError("the archive is truncated")
            yield from ([damage] if damage else []) + held
            return
        except (HoneError, Unreadable):
            raise
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            if is_lost(error):
                raise
            yield from held
            after = None if compression is None else _next_record(stream, last + 1, compression)
            if after is None:
                if damage:
                    yield damage
                yield Fault("truncated" if found or isinstance(error, EOFError) else "bad_archive")
                return
            begun = last if damage is None else start
            damage = Fault("damaged_record", f"at byte {begun}, continued at {after}", after - begun)
            start, found = after, True


def _breaks_off(stream: IO[bytes], last: int, compression: str) -> bool:
    """Whether the file is truncated inside its last record, which begins at `last`."""
    size = stream.seek(0, io.SEEK_END)
    if not compression:
        stream.seek(last)
        top = stream.read(_LONGEST_HEADER)
        end = re.search(rb"\r?\n\r?\n", top)
        length = re.search(rb"(?im)^content-length:\s*(\d+)\s*$", top[: end.start() + 1]) if end else None
        return not (end and length) or last + end.end() + int(length.group(1)) > size
    stream.seek(last)
    if stream.read(len(_MEMBER)) == _MEMBER:
        stream.seek(last)
    else:  # one member for the whole file: records have no offset of their own
        stream.seek(0)
    part = zlib.decompressobj(31)
    rest = b""
    try:
        while chunk := rest or part.unconsumed_tail or stream.read(_STEP):
            part.decompress(chunk, 16 * _STEP)
            rest = part.unused_data
            if part.eof:
                if not (rest := rest or stream.read(_STEP)).startswith(_MEMBER):
                    return False
                part = zlib.decompressobj(31)
    except zlib.error:
        return True
    return True


def _next_record(stream: IO[bytes], start: int, compression: str) -> int | None:
    """The offset of the next WARC record at or after `start`."""
    stream.seek(start)
    place, window = start, b""
    while chunk := stream.read(_STEP):
        window += chunk
        if compression:
            at = window.find(_MEMBER)
            while at >= 0:
                try:
                    if zlib.decompressobj(31).decompress(window[at : at + 4096], 5) == b"WARC/":
                        return place + at
                except zlib.error:
                    pass
                at = window.find(_MEMBER, at + 1)
        else:
            match = _RECORD.search(window)
            if match:
                return place + match.start()
        kept = window[-4096:]
        place += len(window) - len(kept)
        window = kept
        if len(chunk) < _STEP:
            return None
    return None


def _record(record: Any, extractor: Extractor, *, is_text: bool) -> Iterator[RawText | Fault | Noted]:
    """The text of one WARC record, if it holds any."""
    if not is_text and record.is_http:
        status = record.http_headers.status_code if record.http_headers else None
        if status != 200:
            yield Noted(f"HTTP {status}" if status else "HTTP without a status")
            return
    url = record.headers.get("WARC-Target-URI", "").strip("<>")
    if url.startswith(_NO_PAGES):  # answers of name servers, the crawler's own notes
        yield Noted(f"{url.partition(':')[0]}: record")
        return
    kind = "text/plain" if is_text else (record.http_content_type or record.headers.get("Content-Type", ""))
    kind = (kind or "").split(";")[0].strip().lower()
    if kind not in (*_HTML_TYPES, "text/plain"):
        yield _of_kind(kind)
        return
    served = None if is_text else record.http_charset
    expected = record.content_length
    raw = record.reader.read(MAX_RECORD_BYTES + 1)
    if len(raw) < min(expected, MAX_RECORD_BYTES + 1):
        yield Fault("truncated", url, len(raw))
        return
    if not is_text and record.is_http:
        headers = record.http_headers
        try:
            raw = _decoded(raw, headers.get("Transfer-Encoding") or "", headers.get("Content-Encoding") or "")
        except (ValueError, zlib.error) as error:
            yield Fault("bad_record", f"{url}\n{error}", len(raw))
            return
    yield _text(raw, kind, served, url, extractor)


def _word(name: str) -> str:
    """The type of a record, if it is a word."""
    return name.lower() if re.fullmatch(r"[A-Za-z]{1,30}", name) else "record of unknown type"


def _of_kind(kind: str) -> Noted:
    """A record of another content type."""
    return Noted(kind if _TYPE.fullmatch(kind) else "unknown content type")


def _text(raw: bytes, kind: str, served: str | None, url: str, extractor: Extractor) -> RawText | Fault:
    """The text of a page or text file from `url`; a page on which the extractor fails is set aside."""
    if len(raw) > MAX_RECORD_BYTES:
        return Fault("record_too_large", url, len(raw))
    try:
        text = decode_plain(raw, served) if kind == "text/plain" else page_text(raw, extractor, served)
        return RawText(text, url=url)
    except (UnicodeDecodeError, LookupError):
        return Fault("wrong_encoding", url, len(raw))
    except Unreadable as stop:
        return Fault(stop.args[0], url, len(raw))
    except BaseException as error:
        if not poisoned(error):
            raise
        known = isinstance(error, ValueError | RuntimeError) and not isinstance(error, RecursionError)
        return Fault("bad_record" if known else f"failed_{type(error).__name__}", f"{url}\n{error}", len(raw))


def read_arc(stream: IO[bytes], extractor: Extractor) -> Iterator[RawText | Fault | Noted]:
    """Pages of an ARC file, version 1 or 2: repeatedly a line 'URL address date type length', then so many bytes."""
    while line := stream.readline(_LONGEST_HEADER):
        if not line.strip():
            continue
        fields = line.split()
        if len(fields) < 5 or not fields[-1].isdigit():
            yield Fault("bad_archive", line[:200].decode("latin-1"))
            return
        size, url = int(fields[-1]), fields[0].decode("latin-1")
        raw = stream.read(min(size, MAX_RECORD_BYTES + 1))
        left = size - len(raw)
        while left > 0 and (skipped := len(stream.read(min(left, _STEP)))):
            left -= skipped
        if left > 0:
            yield Fault("truncated", url, len(raw))
            return
        if url.startswith("filedesc:"):
            continue
        if url.startswith(_NO_PAGES):
            yield Noted(f"{url.partition(':')[0]}: record")
            continue
        if size > MAX_RECORD_BYTES:
            yield Fault("record_too_large", url, size)
            continue
        try:
            status, headers, body = _http(raw)
        except (ValueError, zlib.error):
            yield Fault("bad_record", url, size)
            continue
        kind, _, rest = headers.get("content-type", "").partition(";")
        if status != 200:
            yield Noted(f"HTTP {status}")
        elif kind.strip().lower() not in (*_HTML_TYPES, "text/plain"):
            yield _of_kind(kind.strip().lower())
        else:
            charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", rest, re.IGNORECASE)
            yield _text(body, kind.strip().lower(), charset.group(1) if charset else None, url, extractor)


def _http(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, decoded body) of a response. Raises ValueError, zlib.error."""
    border = re.search(rb"\r?\n\r?\n", raw)
    if not border or not raw.startswith(b"HTTP/"):
        raise ValueError("not an HTTP response")
    first, *lines = raw[: border.start()].decode("latin-1").splitlines()
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    body = raw[border.end() :]
    body = _decoded(body, headers.get("transfer-encoding", ""), headers.get("content-encoding", ""))
    return int(first.split()[1]), headers, body


def _decoded(body: bytes, transfer: str, content: str) -> bytes:
    """A body without its transfer and content encodings; either may be declared and not applied.

    At most MAX_RECORD_BYTES + 1. Raises ValueError, zlib.error.
    """
    if "chunked" in transfer.lower():
        body = _unchunked(body)
    names = [name.strip().lower() for name in content.split(",") if name.strip()]
    for name in reversed(names):
        if name in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
            body = zlib.decompressobj(31).decompress(body, MAX_RECORD_BYTES + 1)
        elif name == "deflate":
            body = _inflated(body)
        elif name == "zstd" and body.startswith(b"\x28\xb5\x2f\xfd"):
            try:
                body = decompressor().stream_reader(body).read(MAX_RECORD_BYTES + 1)
            except zstandard().ZstdError as error:
                raise ValueError(f"content encoding zstd: {error}") from None
        elif name in ("br", "compress", "x-compress", "zstd") and not body[:200].lstrip().startswith(b"<"):
            raise ValueError(f"content encoding {name}")
    return body


def _inflated(body: bytes) -> bytes:
    """A deflated body, with or without the zlib wrapper of the standard; unchanged when it is neither."""
    for window in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        try:
            return zlib.decompressobj(window).decompress(body, MAX_RECORD_BYTES + 1)
        except zlib.error:
            pass
    return body


def _unchunked(body: bytes) -> bytes:
    """A chunked body put together; unchanged when it is not chunked."""
    parts, place = [], 0
    while True:
        end = body.find(b"\n", place)
        size = re.fullmatch(rb"([0-9a-fA-F]{1,8})\s*(;.*)?\r?", body[place:end]) if end >= 0 else None
        if not size:
            return b"".join(parts) or body
        count = int(size.group(1), 16)
        if not count:
            return b"".join(parts)
        parts.append(body[end + 1 : end + 1 + count])
        place = end + 1 + count
        place += 2 if body[place : place + 2] == b"\r\n" else 1
