"""Encodings: decodes bytes by byte order mark, UTF-8 validity, declaration and finally detection."""

from __future__ import annotations

import codecs
from typing import Protocol

from hone.base.errors import MissingExtra
from hone.feed.files.sniff import MARKS, marked

_SEVEN_BITS = ("iso2022", "hz", "utf_7")
_ENDIAN = {"utf_16": "utf-16-le", "utf_32": "utf-32-le", "utf_8_sig": "utf-8"}
_WIDER = {"iso8859-1": "cp1252", "koi8-r": "koi8-u", "shift_jis": "cp932", "euc_kr": "cp949"}
"""Supersets of encodings that detectors return: texts are as often in the larger one."""
_AROUND_BYTES = 1 << 14
_EVIDENCE_BYTES = 1 << 16
"""Bytes before and after the first one that is not UTF-8 from which the encoding is detected."""
_FEW_BYTES = 64
_HIGH = bytes(range(0x80, 0x100))

BAD = "\udc80"
"""Replaces each undecodable byte in the output of this file's decoders; no encoding has it."""
_MARK_BAD = "hone.bad"
codecs.register_error(_MARK_BAD, lambda error: (BAD * (error.end - error.start), error.end))


class Decoder(Protocol):
    """Decodes a file document by document; each document may come in pieces, the last with `final`."""

    encoding: str
    """Encoding of the separators between documents."""

    def decode(self, raw: bytes, final: bool) -> str: ...


def decoder_of(start: bytes, encoding: str) -> tuple[Decoder, int]:
    """(the decoder of a file that begins with `start`, the length of its byte order mark); `encoding` is that of files without one."""
    for mark, name in MARKS:
        if start.startswith(mark):
            if name in ("utf-16", "utf-32"):
                name += "-le" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF32_LE) else "-be"
            return Known("utf-8" if name == "utf-8-sig" else name), len(mark)
    return (Unknown() if encoding == "auto" else Known(encoding)), 0


class Known:
    """Decodes text of a known encoding; BAD replaces undecodable bytes."""

    def __init__(self, encoding: str) -> None:
        self.encoding = _ENDIAN.get(codecs.lookup(encoding).name.replace("-", "_"), encoding)
        self._decoder = codecs.getincrementaldecoder(self.encoding)(_MARK_BAD)

    def decode(self, raw: bytes, final: bool) -> str:
        """The text of `raw` and of bytes left from earlier calls; all of it when `final`."""
        text = self._decoder.decode(raw, final)
        if final:
            self._decoder.reset()
        return text


class Unknown:
    """Decodes text without a declared encoding: as UTF-8 while it is valid, then as detected from the bytes around the first invalid one.

    Many texts begin with pages of plain ASCII. UTF-8 with some bad bytes stays UTF-8, with BAD for these. Where a
    document has few bytes above ASCII, the file's other documents are better evidence.
    Raises MissingExtra without resiliparse when something is not UTF-8.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._usual = ""
        self._reset()

    def _reset(self) -> None:
        self._held = self._before = b""
        self._name = ""

    def decode(self, raw: bytes, final: bool) -> str:
        """As Known; holds back up to 64 kB from the first byte that is not UTF-8, until the encoding is detected."""
        raw = self._held + raw
        text, self._held = self._decoded(raw, final)
        if final:
            self._reset()
        else:
            self._before = (self._before + raw[: len(raw) - len(self._held)])[-_AROUND_BYTES:]
        return text

    def _decoded(self, raw: bytes, final: bool) -> tuple[str, bytes]:
        """(the text, the bytes at the end that are not decoded yet)."""
        try:
            text, used = codecs.utf_8_decode(raw, "strict", final)
            return text, raw[used:]
        except UnicodeDecodeError as error:
            at = error.start
        begin = raw.rfind(b"\n", 0, at) + 1  # bytes before the first bad one may be UTF-8 by chance
        if not final and len(raw) - at < _EVIDENCE_BYTES:
            return raw[:begin].decode(), raw[begin:]
        self._name = self._judged(self._before + raw[max(begin - _AROUND_BYTES, 0) : at + _EVIDENCE_BYTES])
        decoder = codecs.getincrementaldecoder(self._name)(_MARK_BAD)
        text = decoder.decode(raw[begin:], final)
        return raw[:begin].decode() + text, decoder.getstate()[0]

    def _judged(self, window: bytes) -> str:
        """The encoding of text that is not valid UTF-8."""
        text = window.decode("utf-8", "replace")
        num_bad = text.count("\ufffd")
        num_high = len(window) - len(window.translate(None, _HIGH))
        num_good = len(text) - num_bad - (len(window) - num_high)
        if num_good > num_bad:
            return "utf-8"
        if self._name not in ("", "utf-8"):
            return self._name
        if num_high < _FEW_BYTES and self._usual and BAD not in Known(self._usual).decode(window, False):
            return self._usual
        name = _detected(window)
        if num_high >= _FEW_BYTES:
            self._usual = name
        return name


def decode_text(raw: bytes, encoding: str) -> str:
    """All of a text; `encoding` is that of texts without a byte order mark, or 'auto'. Raises UnicodeDecodeError, MissingExtra."""
    decoder, begin = decoder_of(raw[:4], encoding)
    text = decoder.decode(raw[begin:], True)
    if BAD in text:
        raise UnicodeDecodeError(encoding, raw[:0], 0, 0, "undecodable bytes")
    return text


def _detected(raw: bytes) -> str:
    """The detected encoding of bytes that are not UTF-8. Raises MissingExtra without resiliparse."""
    try:
        from resiliparse.parse.encoding import detect_encoding
    except ImportError:
        raise MissingExtra.of("detecting encodings", "resiliparse", "data") from None
    name = detect_encoding(raw)
    if name in (None, "utf-8"):  # encodings unknown to the web, such as Korea's cp949
        name = detect_encoding(raw, html5_compatible=False)
    name = _WIDER.get(name or "", name)
    usable = _known(name) not in (None, "utf_8", "ascii") and "a\n".encode(name or "") == b"a\n"
    return name if name and usable else "cp1252"


def decode_page(raw: bytes, served: str | None = None) -> str:
    """Text of a web page: byte order mark, then UTF-8 if valid, then the server's declaration, the page's meta tag, detection.

    Pages declared as Latin-1 that are valid UTF-8 are decoded as UTF-8. Undecodable bytes become U+FFFD.
    Raises MissingExtra without resiliparse.
    """
    try:
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    except ImportError:
        raise MissingExtra.of("reading HTML", "resiliparse", "data") from None
    name = marked(raw) or _certain(raw, served)
    if name:
        return raw.decode(name, "replace")
    text = _told(raw, served)
    if text is not None:
        return text
    name = detect_encoding(raw, from_html_meta=True) or "utf-8"
    if name == "utf-8" and detect_encoding(raw, html5_compatible=False) == "cp949":
        return raw.decode("cp949", "replace")
    return bytes_to_str(raw, name, errors="replace")


def decode_plain(raw: bytes, served: str | None = None) -> str:
    """Plain text from the web: as a page, without a meta tag. Raises UnicodeDecodeError, MissingExtra."""
    name = None if marked(raw) else _certain(raw, served)
    if name:
        return raw.decode(name)
    text = None if marked(raw) else _told(raw, served)
    return decode_text(raw, "auto") if text is None else text


def _certain(raw: bytes, served: str | None) -> str | None:
    """The encoding declared by the server, if its text can be valid UTF-8 by chance without being UTF-8."""
    served = _known(served)
    if served and served.startswith(_SEVEN_BITS):  # these look like ASCII
        return served
    return served if served and served.startswith(("utf_16", "utf_32")) and b"\0" in raw[:100] else None


def _told(raw: bytes, served: str | None) -> str | None:
    """The text in UTF-8 if valid, else in the encoding declared by the server; None when neither decodes."""
    served = _known(served)
    for name in ("utf_8", "cp1252" if served in ("iso8859_1", "ascii") else served):
        try:
            return raw.decode(name) if name else None
        except UnicodeDecodeError:
            pass
    return None


def _known(name: str | None) -> str | None:
    """Python's name of an encoding, or None."""
    try:
        return codecs.lookup(name.strip().strip("\"'")).name.replace("-", "_") if name else None
    except (LookupError, ValueError):
        return None
