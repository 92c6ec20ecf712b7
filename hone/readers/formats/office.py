"""Office: the text of DOCX and ODT documents, and of EPUB books in reading order: zip files of XML."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from io import BytesIO
from urllib.parse import unquote
from zipfile import ZipFile

from hone.base.errors import MissingExtra
from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable
from hone.readers.documents import Options, RawText
from hone.readers.formats.containers import open_zip, unpacked
from hone.readers.formats.xml import Event, Skip, events
from hone.readers.pages import Extractor, page_text
from hone.readers.texts import pieces

MAX_PART_BYTES = 256 << 20
"""XML of one part of a document."""
MAX_CHAPTER_BYTES = 64 << 20
MAX_BOOK_CHARS = 256 << 20
_PAGES = ("application/xhtml+xml", "text/html")
_NOT_IN_DOCX = frozenset(["pPr", "rPr", "tblPr", "trPr", "tcPr", "sectPr", "del", "moveFrom", "Fallback", "instrText"])
_NOT_IN_ODT = frozenset(["tracked-changes", "annotation", "note-citation", "sequence-decls", "forms", "image", "desc"])


def read_docx(file: File, options: Options) -> Iterator[RawText]:
    """The text of a Word document: body, footnotes, endnotes, without deleted text and field codes."""
    with open_zip(file) as archive:
        parts = ["word/document.xml", "word/footnotes.xml", "word/endnotes.xml"]
        texts = [
            _docx(_part(archive, name, "bad_docx", MAX_PART_BYTES))
            for name in parts
            if name == parts[0] or name in archive.namelist()
        ]
    yield from pieces("\n".join(text for text in texts if text.strip()), options.max_document_chars)


def read_odt(file: File, options: Options) -> Iterator[RawText]:
    """The text of an OpenDocument text: body, then its notes, without deleted text and comments."""
    with open_zip(file) as archive:
        if "META-INF/manifest.xml" in archive.namelist() and b"encryption-data" in _part(
            archive, "META-INF/manifest.xml", "bad_odt", MAX_PART_BYTES
        ):
            raise Unreadable("encrypted", file.name)
        text = _odt(_part(archive, "content.xml", "bad_odt", MAX_PART_BYTES))
    yield from pieces(text, options.max_document_chars)


def _part(archive: ZipFile, name: str, reason: str, most: int) -> bytes:
    try:
        return unpacked(archive, name, most)
    except KeyError:
        raise Unreadable(reason, f"it has no {name or 'package document'}") from None


class _Lines:
    """Text in lines; inside of a table's cell, lines are joined, and cells are separated by tabs."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._cells = 0

    def cell(self, event: Event) -> None:
        """Begins or ends a cell."""
        if event.attributes is not None:
            self._cells += 1
            return
        self._cells -= 1
        while self.parts and self.parts[-1] == " ":
            self.parts.pop()
        self.parts.append("\t")

    def line(self) -> None:
        """Ends a paragraph."""
        self.parts.append(" " if self._cells else "\n")

    def row(self) -> None:
        """Ends a row."""
        if self.parts and self.parts[-1] == "\t":
            self.parts.pop()
        self.line()

    @property
    def text(self) -> str:
        return "".join(self.parts)


def _docx(raw: bytes) -> str:
    lines, skip, inside = _Lines(), Skip(_NOT_IN_DOCX), False
    for event in events(BytesIO(raw)):
        if skip.over(event):
            continue
        starts = event.attributes is not None
        if not event.name:
            if inside:
                lines.parts.append(event.text)
        elif event.name == "t":
            inside = starts
        elif event.name == "tc":
            lines.cell(event)
        elif event.name == "tab" and starts:
            lines.parts.append("\t")
        elif event.name in ("br", "cr") and starts:
            lines.line()
        elif event.name == "noBreakHyphen" and starts:
            lines.parts.append("-")
        elif event.name == "p" and not starts:
            lines.line()
        elif event.name == "tr" and not starts:
            lines.row()
    return lines.text


def _odt(raw: bytes) -> str:
    body, notes = _Lines(), _Lines()
    lines, skip = body, Skip(_NOT_IN_ODT)
    inside = 0
    for event in events(BytesIO(raw)):
        if skip.over(event):
            continue
        starts = event.attributes is not None
        if not event.name:
            if inside:
                lines.parts.append(event.text)
        elif event.name == "note-body":
            lines = notes if starts else body
        elif event.name in ("p", "h"):
            inside += 1 if starts else -1
            if not starts:
                lines.line()
        elif event.name == "table-cell":
            lines.cell(event)
        elif event.name == "table-row" and not starts:
            lines.row()
        elif event.name == "tab" and starts:
            lines.parts.append("\t")
        elif event.name == "line-break" and starts:
            lines.line()
        elif event.name == "s" and event.attributes is not None:
            count = event.attributes.get("c", "1")
            lines.parts.append(" " * (min(int(count), 1000) if count.isdigit() else 1))
    return body.text + notes.text


def read_epub(file: File, options: Options) -> Iterator[RawText]:
    """The chapters of a book in the order of its spine, as one text; the table of contents is left out. Raises Unreadable."""
    texts: list[str] = []
    size = 0
    with open_zip(file) as archive:
        for name in _spine(archive):
            text = page_text(_part(archive, name, "bad_epub", MAX_CHAPTER_BYTES), WholePage())
            size += len(text)
            if size > MAX_BOOK_CHARS:
                raise Unreadable("too_large", file.name)
            texts.append(text.strip())
    yield from pieces("\n\n".join(text for text in texts if text), options.max_document_chars)


class WholePage(Extractor):
    """All text of a page."""

    def extract(self, page: str) -> str:
        """The text of `page`, an XHTML document. Raises MissingExtra without resiliparse."""
        try:
            from resiliparse.extract.html2text import extract_plain_text
        except ImportError:
            raise MissingExtra.of("reading EPUB files", "resiliparse", "data") from None
        return extract_plain_text(
            page, main_content=False, preserve_formatting=True, list_bullets=False, alt_texts=False
        )


def _spine(archive: ZipFile) -> list[str]:
    """The names of the chapters in reading order."""
    package = ""
    for event in events(BytesIO(_part(archive, "META-INF/container.xml", "bad_epub", MAX_CHAPTER_BYTES))):
        if event.name == "rootfile" and event.attributes:
            package = package or event.attributes.get("full-path", "")
    pages: dict[str, str] = {}
    order: list[str] = []
    for event in events(BytesIO(_part(archive, package, "bad_epub", MAX_CHAPTER_BYTES))):
        about = event.attributes
        if (
            event.name == "item"
            and about
            and about.get("media-type") in _PAGES
            and "nav" not in about.get("properties", "").split()
        ):
            pages[about.get("id", "")] = posixpath.normpath(
                posixpath.join(posixpath.dirname(package), unquote(about.get("href", "")))
            )
        elif event.name == "itemref" and about:
            order.append(about.get("idref", ""))
    names = [pages[one] for one in order if one in pages]
    if "META-INF/encryption.xml" in archive.namelist():
        locked = {
            event.attributes.get("URI", "")
            for event in events(BytesIO(_part(archive, "META-INF/encryption.xml", "bad_epub", MAX_CHAPTER_BYTES)))
            if event.name == "CipherReference" and event.attributes
        }
        if locked & set(names):
            raise Unreadable("encrypted", f"{len(locked & set(names))} chapters")
    return names
