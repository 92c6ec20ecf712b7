"""EPUB: the text of a book, chapter by chapter in reading order."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from io import BytesIO
from urllib.parse import unquote
from zipfile import ZipFile

from hone.base.errors import MissingExtra
from hone.data.readers.documents import Options, RawText
from hone.data.readers.extractor import Extractor, page_text
from hone.data.readers.formats.containers import open_zip, unpacked
from hone.data.readers.formats.xml_events import events
from hone.data.readers.texts import pieces
from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable

MAX_CHAPTER_BYTES = 64 << 20
MAX_BOOK_CHARS = 256 << 20
_PAGES = ("application/xhtml+xml", "text/html")


def read_epub(file: File, options: Options) -> Iterator[RawText]:
    """The chapters of a book in the order of its spine, as one text; the table of contents is left out. Raises Unreadable."""
    texts: list[str] = []
    size = 0
    with open_zip(file) as archive:
        for name in _spine(archive):
            text = page_text(_part(archive, name), WholePage())
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
    for event in events(BytesIO(_part(archive, "META-INF/container.xml"))):
        if event.name == "rootfile" and event.attributes:
            package = package or event.attributes.get("full-path", "")
    pages: dict[str, str] = {}
    order: list[str] = []
    for event in events(BytesIO(_part(archive, package))):
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
            for event in events(BytesIO(_part(archive, "META-INF/encryption.xml")))
            if event.name == "CipherReference" and event.attributes
        }
        if locked & set(names):
            raise Unreadable("encrypted", f"{len(locked & set(names))} chapters")
    return names


def _part(archive: ZipFile, name: str) -> bytes:
    try:
        return unpacked(archive, name, MAX_CHAPTER_BYTES)
    except KeyError:
        raise Unreadable("bad_epub", f"it has no {name or 'package document'}") from None
