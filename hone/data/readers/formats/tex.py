"""TeX: LaTeX sources without preamble, comments and bibliography, as the RedPajama data set prepares arXiv's (arXiv:2411.12372).

Commands and formulas stay as they are written: a model that reads TeX learns to write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hone.data.readers.documents import Options, RawText
from hone.data.readers.encodings import decode_text
from hone.data.readers.texts import pieces
from hone.feed.files.listing import File
from hone.feed.files.streams import read_whole

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
