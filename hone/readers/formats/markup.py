"""Markup: LaTeX sources without preamble, comments and bibliography, and Jupyter notebooks as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hone.feed.files.listing import File
from hone.feed.files.streams import Unreadable, read_whole
from hone.readers.documents import Options, RawText
from hone.readers.encodings import decode_text
from hone.readers.texts import pieces

_BEGIN, _END = re.compile(r"\\begin\s*\{document\}"), re.compile(r"\\end\s*\{document\}")
_LINE_COMMENT = re.compile(r"^[ \t]*%.*\n?", re.MULTILINE)
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%.*")
_LEFT_OUT = re.compile(
    r"\\begin\s*\{(thebibliography|comment|filecontents\*?)\}.*?\\end\s*\{\1\}|"
    r"\\(bibliography|bibliographystyle|printbibliography|nocite|maketitle|tableofcontents|vspace\*?|vskip|hspace\*?|label)\b"
    r"(\[[^\]\n]*\])?(\{[^{}\n]*\})?",
    re.DOTALL,
)
_MACRO = re.compile(
    r"\\(?:newcommand|renewcommand|providecommand)\*?\s*\{?\s*(\\[A-Za-z]+)\s*\}?\s*\{((?:[^{}]|\{[^{}]*\})*)\}|"
    r"\\def\s*(\\[A-Za-z]+)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_MAX_GROWTH = 4
_MAX_MACROS = 500


def read_tex(file: File, options: Options) -> Iterator[RawText]:
    """The body of a LaTeX file; of plain TeX and of included files, everything. Macros without arguments are expanded once."""
    source = decode_text(read_whole(file), options.encoding)
    yield from pieces(body(source), options.max_document_chars)


def body(source: str) -> str:
    """The text of a LaTeX source."""
    source = _COMMENT.sub(r"\1", _LINE_COMMENT.sub("", source.replace("\r\n", "\n")))
    macros = {}
    for found in _MACRO.finditer(source):
        name, value = (found.group(1), found.group(2)) if found.group(1) else (found.group(3), found.group(4))
        if len(macros) < _MAX_MACROS and "#" not in value:
            macros[name] = value
    begin, end = _BEGIN.search(source), _END.search(source)
    text = source[begin.end() : end.start() if end else len(source)] if begin else source
    text = _LEFT_OUT.sub("", _MACRO.sub("", text))
    if macros:
        names = "|".join(re.escape(name) for name in sorted(macros, key=len, reverse=True))
        expanded = re.sub(rf"({names})(?![A-Za-z])", lambda found: macros[found.group(1)], text)
        text = expanded if len(expanded) <= _MAX_GROWTH * len(text) + 1000 else text
    return re.sub(r"\n{3,}", "\n\n", text).strip()


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
