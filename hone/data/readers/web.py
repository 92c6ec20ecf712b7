"""Web pages: main text out of HTML with resiliparse, and the records of WARC and WET archives with fastwarc."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from hone.base.errors import MissingExtra

_HTML_TYPES = ("text/html", "application/xhtml+xml")
MAX_RECORD_BYTES = 32 << 20
"""Larger web records are no pages."""


def html_to_text(raw: bytes, encoding: str | None = None) -> str:
    """Main text of an HTML page in `encoding` (as served; else found out from its bytes). Raises MissingExtra, ValueError."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
        from resiliparse.parse.html import HTMLTree
    except ImportError:
        raise MissingExtra.of("reading HTML", "resiliparse", "data") from None
    encoding = encoding or detect_encoding(raw, from_html_meta=True)
    page = HTMLTree.parse(bytes_to_str(raw, encoding))
    return extract_plain_text(page, main_content=True, alt_texts=False, preserve_formatting=True)


def read_warc(stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    """('text', text) of each record that holds a page or WET text, or ('broken', reason) of one that cannot be read.

    Request, metadata and similar records are passed over in silence. A stream that breaks off ends with one
    ('broken', 'truncated'). Raises MissingExtra without fastwarc.
    """
    try:
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise MissingExtra.of("reading WARC files", "fastwarc", "data") from None
    wanted = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
    found = False
    try:
        for record in ArchiveIterator(stream, record_types=wanted, parse_http=True, auto_decode="all"):
            found = True
            yield from _record(record, is_text=record.record_type == WarcRecordType.conversion)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        if isinstance(error, MissingExtra):
            raise
        yield "broken", "bad_archive" if not found else "truncated"


def _record(record, *, is_text: bool) -> Iterator[tuple[str, str]]:
    try:
        if not is_text and record.is_http:
            status = record.http_headers.status_code if record.http_headers else None
            if status != 200:
                return
        kind = "text/plain" if is_text else (record.http_content_type or record.headers.get("Content-Type", ""))
        kind = (kind or "").split(";")[0].strip().lower()
        if kind not in (*_HTML_TYPES, "text/plain"):
            return
        raw = record.reader.read(MAX_RECORD_BYTES + 1)
        if len(raw) > MAX_RECORD_BYTES:
            yield "broken", "record_too_large"
        elif kind == "text/plain":
            yield "text", raw.decode("utf8")
        else:
            yield "text", html_to_text(raw, record.http_charset)
    except UnicodeDecodeError:
        yield "broken", "wrong_encoding"
    except (ValueError, RuntimeError, LookupError):
        yield "broken", "bad_record"
