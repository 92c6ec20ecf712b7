"""Notebooks: the cells of Jupyter notebooks in order, code in fences, without outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hone.data.readers.documents import Options, RawText
from hone.data.readers.texts import pieces
from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable, read_whole


def read_notebook(file: File, options: Options) -> Iterator[RawText]:
    """A notebook (formats 3 and 4) as Markdown: text cells as they are, code cells in fences with the kernel's language."""
    try:
        book = json.loads(read_whole(file))
    except (ValueError, RecursionError) as error:
        raise Unreadable("bad_notebook", str(error)) from None
    cells = _cells(book)
    if cells is None:
        raise Unreadable("bad_notebook", "it has no cells")
    about = book.get("metadata") if isinstance(book.get("metadata"), dict) else {}
    info = about.get("language_info") or about.get("kernelspec") or {}
    language = info.get("name" if "language_info" in about else "language", "") if isinstance(info, dict) else ""
    texts = []
    for cell in cells:
        if not isinstance(cell, dict):
            continue
        kind, source = cell.get("cell_type"), _joined(cell.get("source", cell.get("input", ""))).strip("\n")
        if not source.strip():
            continue
        if kind == "code":
            fence = "````" if "```" in source else "```"
            texts.append(f"{fence}{language if isinstance(language, str) else ''}\n{source}\n{fence}")
        elif kind == "heading":
            texts.append(f"# {source}")
        else:
            texts.append(source)
    yield from pieces("\n\n".join(texts), options.max_document_chars)


def _cells(book: Any) -> list[Any] | None:
    if not isinstance(book, dict):
        return None
    if isinstance(book.get("cells"), list):
        return book["cells"]
    sheets = book.get("worksheets")
    if isinstance(sheets, list):
        return [cell for sheet in sheets if isinstance(sheet, dict) for cell in sheet.get("cells", [])]
    return None


def _joined(source: Any) -> str:
    if isinstance(source, list):
        return "".join(line for line in source if isinstance(line, str))
    return source if isinstance(source, str) else ""
