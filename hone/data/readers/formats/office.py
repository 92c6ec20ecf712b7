"""Office: the text of DOCX and ODT documents, paragraph by paragraph, cells of tables separated by tabs."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from zipfile import ZipFile

from hone.data.readers.documents import Options, RawText
from hone.data.readers.formats.containers import open_zip, unpacked
from hone.data.readers.formats.xml_events import Event, Skip, events
from hone.data.readers.texts import pieces
from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable

MAX_PART_BYTES = 256 << 20
"""XML of one part of a document."""
_NOT_IN_DOCX = frozenset(["pPr", "rPr", "tblPr", "trPr", "tcPr", "sectPr", "del", "moveFrom", "Fallback", "instrText"])
_NOT_IN_ODT = frozenset(["tracked-changes", "annotation", "note-citation", "sequence-decls", "forms", "image", "desc"])


def read_docx(file: File, options: Options) -> Iterator[RawText]:
    """The text of a Word document: body, footnotes, endnotes, without deleted text and field codes."""
    with open_zip(file) as archive:
        parts = ["word/document.xml", "word/footnotes.xml", "word/endnotes.xml"]
        texts = [
            _docx(_part(archive, name, "bad_docx")) for name in parts if name == parts[0] or name in archive.namelist()
        ]
    yield from pieces("\n".join(text for text in texts if text.strip()), options.max_document_chars)


def read_odt(file: File, options: Options) -> Iterator[RawText]:
    """The text of an OpenDocument text: body, then its notes, without deleted text and comments."""
    with open_zip(file) as archive:
        if "META-INF/manifest.xml" in archive.namelist() and b"encryption-data" in _part(
            archive, "META-INF/manifest.xml", "bad_odt"
        ):
            raise Unreadable("encrypted", file.name)
        text = _odt(_part(archive, "content.xml", "bad_odt"))
    yield from pieces(text, options.max_document_chars)


def _part(archive: ZipFile, name: str, reason: str) -> bytes:
    try:
        return unpacked(archive, name, MAX_PART_BYTES)
    except KeyError:
        raise Unreadable(reason, f"it has no {name}") from None


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
