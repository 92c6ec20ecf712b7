"""Encodings: bytes to text by byte order mark, validity, declaration and at last detection."""

from __future__ import annotations

import codecs

from hone.base.errors import MissingExtra

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SEVEN_BITS = ("iso2022", "hz", "utf_7")
_DETECTED_BYTES = 1 << 20


def marked(start: bytes) -> str | None:
    """The encoding that a byte order mark at the start of a file names."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), None)


def guess(raw: bytes) -> str:
    """The encoding of text that declares none. Raises MissingExtra without resiliparse."""
    name = marked(raw)
    if name:
        return name
    start = raw[:_DETECTED_BYTES]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # a character cut at the end is no mistake
    except UnicodeDecodeError:
        try:
            from resiliparse.parse.encoding import detect_encoding
        except ImportError:
            raise MissingExtra.of("finding out encodings", "resiliparse", "data") from None
        return detect_encoding(start) or "utf-8"
    return "utf-8"


def decode_page(raw: bytes, served: str | None = None) -> str:
    """Text of a web page: byte order mark, then UTF-8 if it is valid, then what the server said, the page's meta tag, detection.

    Pages that say Latin-1 and are valid UTF-8 are UTF-8 in truth. Bytes without meaning become U+FFFD.
    Raises MissingExtra without resiliparse.
    """
    try:
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    except ImportError:
        raise MissingExtra.of("reading HTML", "resiliparse", "data") from None
    name = marked(raw)
    if name:
        return raw.decode(name, "replace")
    served = _known(served)
    if served and served.startswith(_SEVEN_BITS):  # these look like ASCII
        return raw.decode(served, "replace")
    if (served or "").startswith(("utf_16", "utf_32")) and b"\0" in raw[:100]:
        return raw.decode(served or "", "replace")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if served and served != "utf_8":
        try:
            return raw.decode("cp1252" if served in ("iso8859_1", "ascii") else served)
        except UnicodeDecodeError:
            pass
    return bytes_to_str(raw, detect_encoding(raw, from_html_meta=True) or "utf-8", errors="replace")


def _known(name: str | None) -> str | None:
    """Python's name of an encoding, or None."""
    try:
        return codecs.lookup(name.strip().strip("\"'")).name.replace("-", "_") if name else None
    except (LookupError, ValueError):
        return None
