"""PDF: the text layer of PDF files by PDFium, columns one after the other, lines joined to paragraphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from hone.base.errors import MissingExtra
from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable, read_whole
from hone.readers.documents import Options, RawText
from hone.readers.texts import pieces

MAX_PDF_BYTES = 512 << 20
MAX_TEXT_CHARS = 64 << 20
_HYPHEN = re.compile("[\u0002\ufffe\u00ad]\r?\n?")
"""PDFium's mark of a hyphen at the end of a line that parts a word."""
_COLUMN_SHARE = 0.28
"""Least mean width of a column's lines, as a share of the page; cells of tables are narrower."""
_LEAST_LINES = 4
_NOT_ALONE = 3
_ENDS = '.!?:;。！？…"”»)'
_FURNITURE_CHARS = 120


def read_pdf(file: File, options: Options) -> Iterator[RawText]:
    """The text of a PDF file; running headers, footers and page numbers are left out. Raises Unreadable: 'no_text_layer' for
    scanned pages, 'encrypted', 'bad_pdf', 'too_large'. Raises MissingExtra without pypdfium2.
    """
    try:
        import pypdfium2
    except ImportError:
        raise MissingExtra.of("reading PDF files", "pypdfium2", "data") from None
    raw = read_whole(file, MAX_PDF_BYTES)
    try:
        document = pypdfium2.PdfDocument(raw)
    except pypdfium2.PdfiumError as error:
        raise Unreadable("encrypted" if "assword" in str(error) else "bad_pdf", str(error)) from None
    pages: list[list[str]] = []
    size = 0
    try:
        for number in range(len(document)):
            lines = _page_lines(document, number, pypdfium2.PdfiumError)
            size += sum(map(len, lines))
            if size > MAX_TEXT_CHARS:
                raise Unreadable("too_large", f"more than {MAX_TEXT_CHARS >> 20} MB of text")
            pages.append(lines)
    finally:
        document.close()
    if not any(pages):
        raise Unreadable("no_text_layer", f"{len(pages)} pages")
    text = "\n\n".join(_paragraphs(lines) for lines in _without_furniture(pages) if lines)
    yield from pieces(text, options.max_document_chars)


def _page_lines(document: Any, number: int, failure: type[Exception]) -> list[str]:
    """The lines of one page; none for one that PDFium cannot load."""
    try:
        page = document[number]
        layer = page.get_textpage()
    except failure:
        return []
    try:
        if not layer.count_chars():
            return []
        width = page.get_width()
        boxes = _boxes(layer)
        order = regions(boxes, width)
        parts = [layer.get_text_bounded(*box) for box in order] if order else [layer.get_text_range()]
        text = _HYPHEN.sub("", "\n".join(parts)).replace("\r", "")
        return [line.strip() for line in text.split("\n") if line.strip()]
    finally:
        layer.close()
        page.close()


Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in points from the page's lower left corner."""


def _boxes(layer: Any) -> list[Box]:
    """The runs of text on a line, in the order of the file."""
    return [layer.get_rect(number) for number in range(layer.count_rects())]


def regions(boxes: list[Box], width: float) -> list[Box]:
    """The parts of a page in reading order, when the file's own order runs across two columns; else none.

    Most files have their columns one after the other, and then their order is better than any guess. Where lines change
    the side of a gutter again and again at the same height, and are as wide as lines of prose (cells of tables are
    narrower), the page is parted: full-width lines apart, between them the left column, then the right one.
    """
    gutter = _gutter(boxes, width)
    if gutter is None:
        return []
    side = [0 if box[2] <= gutter else 1 if box[0] >= gutter else 2 for box in boxes]
    crossed = sum(
        {a, b} == {0, 1} and abs(one[3] - two[3]) < 0.6 * max(one[3] - one[1], 1.0)
        for a, b, one, two in zip(side, side[1:], boxes, boxes[1:])
    )
    lines = min(side.count(0), side.count(1))
    if lines < _LEAST_LINES or crossed < max(_NOT_ALONE, 0.5 * lines):
        return []
    for which in (0, 1):
        if fmean(box[2] - box[0] for box, one in zip(boxes, side) if one == which) < _COLUMN_SHARE * width:
            return []
    found: list[Box] = []
    top = max(box[3] for box in boxes) + 1
    wide = sorted((box for box, one in zip(boxes, side) if one == 2), key=lambda box: -box[3])
    bottom = min(box[1] for box in boxes) - 1
    for box in [*wide, None]:
        low = bottom if box is None else box[3]
        if top - low > 1:
            found += [(0.0, low, gutter, top), (gutter, low, width, top)]
        if box is not None:
            found.append((0.0, box[1] - 0.5, width, box[3]))
            top = min(top, box[1] - 0.5)
    return found


def _gutter(boxes: list[Box], width: float) -> float | None:
    """The middle of the strip near the page's middle that fewest lines cross; None when three tenths of them or more do."""
    best, least = None, max(0.3 * len(boxes), 3.0)
    for step in range(35, 66):
        place = width * step / 100
        crossing = sum(box[0] < place < box[2] for box in boxes)
        if crossing < least or (crossing == least and best is not None and abs(step - 50) < abs(best - 50)):
            best, least = step, crossing
    return None if best is None else width * best / 100


def _without_furniture(pages: list[list[str]]) -> list[list[str]]:
    """The pages without first and last lines that many of them share, numbers aside: running titles, page numbers."""
    counts = Counter[str]()
    for lines in pages:
        counts.update({_shape(line) for line in (*lines[:2], *lines[-2:])})
    most = max(_NOT_ALONE, len(pages) // 3)
    shared = {shape for shape, count in counts.items() if count >= most and len(shape) <= _FURNITURE_CHARS}
    if not shared:
        return pages
    found = []
    for lines in pages:
        begin = next((n for n, line in enumerate(lines[:2]) if _shape(line) not in shared), min(2, len(lines)))
        rest = lines[begin:]
        end = next((n for n, line in enumerate(rest[::-1][:2]) if _shape(line) not in shared), min(2, len(rest)))
        found.append(rest[: len(rest) - end])
    return found


def _shape(line: str) -> str:
    return re.sub(r"\d+", "#", line)


def _paragraphs(lines: list[str]) -> str:
    """Lines joined where a sentence goes on: the first does not end one, and the next begins with a small letter."""
    out: list[str] = []
    for line in lines:
        if out and line[0].islower() and out[-1][-1] not in _ENDS:
            out[-1] += f" {line}"
        else:
            out.append(line)
    return "\n".join(out)
