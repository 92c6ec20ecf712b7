"""Sniff: the format of a file without an ending, by its first bytes."""

from __future__ import annotations

import codecs
import re
import zlib
from dataclasses import replace

from hone.feed.files.listing import File
from hone.feed.files.streams import head

MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and their encodings; a longer mark before one that it begins with."""
_HEAD_BYTES = 1 << 14
_PACKED = ((b"\x1f\x8b\x08", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"), (b"BZh", ".bz2"), (b"\xfd7zXZ\0", ".xz"))
_MAGIC = (
    (b"%PDF-", "pdf"),
    (b"PAR1", "parquet"),
    (b"ARROW1\0\0", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
    (b"WARC/", "warc"),
    (b"filedesc:", "warc"),
)
_PAGE = re.compile(rb"(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_HEADER = re.compile(
    rb"(received|from|to|subject|date|message-id|return-path|mime-version|delivered-to|x-[\w-]+): ", re.I
)
_MBOX = re.compile(rb"From \S+@?\S* +\S{3} \S{3} +\d")
_CONTROLS = bytes(set(range(32)) - {9, 10, 12, 13, 27})


def marked(start: bytes) -> str | None:
    """The encoding given by a byte order mark at the start of a file."""
    return next((name for mark, name in MARKS if start.startswith(mark)), None)


def sniffed(file: File) -> File | None:
    """`file` with the format and compression that its content has; None for content that is not text and no known format.

    Office documents and e-books are 'zip': what is in them says what they are.
    Raises OSError as reading does.
    """
    start = _head(file)
    if not file.compression:
        for magic, compression in _PACKED:
            if start.startswith(magic):
                file = replace(file, compression=compression)
                start = _head(file)
                break
    format = format_of(start)
    if format == "zip" and file.compression:
        return None
    return replace(file, format=format) if format else None


def _head(file: File) -> bytes:
    try:
        return head(file, _HEAD_BYTES)
    except Exception as error:
        if isinstance(error, zlib.error) or type(error).__name__ in ("ZstdError", "LZMAError"):
            return b""
        raise


def format_of(start: bytes) -> str:
    """The format of a file that begins with `start`, '' for bytes that are neither text nor known."""
    for magic, format in _MAGIC:
        if start.startswith(magic):
            return format
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if start[257:262] == b"ustar":
        return "tar"
    if marked(start[:4]):
        return _textual(start[3:]) if start.startswith(codecs.BOM_UTF8) else "text"
    if start.translate(None, _CONTROLS) != start:
        return ""
    return _textual(start)


def _textual(start: bytes) -> str:
    """The format of text."""
    bare = start.lstrip()
    if bare[:1] in (b"{", b"["):
        return ("ipynb" if b'"nbformat"' in start and b'"cells"' in start else "json") if _is_json(bare) else "text"
    if _PAGE.match(bare):
        return "html"
    if bare.startswith((b"<?xml", b"<mediawiki")):
        return "xml"
    if _MBOX.match(start):
        return "mbox"
    lines = start.split(b"\n", 8)[:4]
    if (
        len(lines) == 4
        and all(_HEADER.match(line) or line[:1] in b" \t" for line in lines if line.strip())
        and _HEADER.match(start)
    ):
        return "eml"
    if re.search(rb"^\s*\\(documentclass|documentstyle|begin\{document\})", start, re.MULTILINE):
        return "tex"
    return "text"


def _is_json(bare: bytes) -> bool:
    """Whether text that begins with a bracket continues as JSON does."""
    return bool(re.match(rb'\{\s*("|\}|$)|\[\s*([\[{"\]\d-]|true|false|null|$)', bare))
