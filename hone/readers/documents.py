"""Documents: what readers return, reading options, and checks of a text: NULs, mojibake, emptiness."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hone.base.errors import HoneError, MissingExtra
from hone.feed.files.listing import File
from hone.text.batch import Texts
from hone.text.normalize import is_piled, normalize

SAMPLE_CHARS = 400
BLOCK_BYTES = 16 << 20
"""About the bytes of text in a batch."""
MAX_ROW_BYTES = 64 << 20
MAX_REPLACED = 0.01
"""A text with a larger share of U+FFFD, which replaces bytes that could not be decoded, was read in the wrong encoding."""
MAX_NULS = 0.001
"""A text with a larger share of NUL characters, and with more than one, is binary; fewer are removed."""
MAX_LEFT = 0.01
"""Mojibake is repaired where possible; a text with more suspect places per character after that is set aside."""
_TAILS = "".join(
    sorted({chr(byte) for byte in range(0x80, 0xC0)} | set(bytes(range(0x80, 0xC0)).decode("cp1252", "ignore")))
)
_SUSPECT = re.compile(f"[\u00c2-\u00df][{_TAILS}]|[\u00e0-\u00f4][{_TAILS}]{{2}}|[\u0080-\u009f]")
"""UTF-8 that was read as Latin-1 or Windows-1252, or a control character in place of one of Windows-1252."""
_CUT_QUOTE = re.compile("\u00e2\u20ac(?![\u0080-\uffff])")
"""A closing quotation mark read as Windows-1252, which has no character for its last byte."""


class Document(NamedTuple):
    """One text. `id` is a hash of the file's name and the document's number in it (of a table's row: its place); `kind` is 'prose', 'code',
    or 'row' for a table's row, of which its signals tell which of the two it is (hone/text/signals/code.py).

    Documents of one `family` (uint64) must be in one split: a module's docstrings are also in its source. `url` is where
    the text was found, if known; `metadata` is JSON of the other requested fields, or ''.
    """

    id: str
    text: str
    source: str
    group: str
    kind: str
    family: int
    url: str = ""
    metadata: str = ""


class Broken(NamedTuple):
    """Input that could not become a document, and why."""

    reason: str
    source: str
    text: str
    num_bytes: int


class Noted(NamedTuple):
    """Something in the input that is counted and is no document: a record or member of another kind (`what`), or a repair.

    `repaired`: `count` documents were changed in this way and kept.
    """

    what: str
    count: int = 1
    repaired: bool = False


NUL_REMOVED = Noted("NUL characters removed", repaired=True)


class Batch(NamedTuple):
    """Documents in columns: `texts` and, for each of its k texts, the fields of Document."""

    texts: Texts
    ids: list[str]
    sources: list[str]
    groups: list[str]
    kinds: list[str]
    families: list[int]
    urls: list[str]
    metadata: list[str]

    def documents(self) -> list[Document]:
        """The documents one by one."""
        rest = (self.sources, self.groups, self.kinds, self.families, self.urls, self.metadata)
        return [Document(*row) for row in zip(self.ids, self.texts.strings(), *rest)]


class Rows(NamedTuple):
    """Texts of a file's rows, unchecked. `urls` and `metadata` are None when not requested or absent.

    `places` int64 [n] is the position of each text in the file: the first byte of its line, or the number of its row.
    """

    texts: Texts
    urls: list[str] | None
    metadata: list[str] | None
    places: np.ndarray


class Options(NamedTuple):
    """Reading options.

    `text_field` and `url_field` name fields of JSON rows and columns of Parquet tables ('a.b': field b of object a);
    `metadata_fields` are copied. `encoding` is that of text files ('auto': detected). `extractor` extracts the text
    of HTML; None is the fast one. `chat` is the form of rows that are conversations; '' where they are texts.
    """

    text_field: str = "text"
    encoding: str = "utf-8"
    max_document_chars: int = 400_000
    extractor: Any = None
    url_field: str = "url"
    metadata_fields: tuple[str, ...] = ()
    chat: str = ""


class RawText(NamedTuple):
    """A text as read from a file."""

    text: str
    kind: str = "prose"
    url: str = ""
    metadata: str = ""


class Fault(NamedTuple):
    """Input that a reader cannot turn into text: the reason, an excerpt, its size.

    `numbered`: it counts as a document, so that those after it keep their numbers.
    """

    reason: str
    shown: str = ""
    num_bytes: int | None = None
    numbered: bool = False

    def broken(self, source: str) -> Broken:
        """As `Broken`, counted under `source`."""
        shown = self.shown[:SAMPLE_CHARS].replace("\0", "\\0").encode("utf8", "replace").decode()
        return Broken(
            self.reason, source, shown, len(shown.encode("utf8")) if self.num_bytes is None else self.num_bytes
        )


def described(fields: dict[str, Any]) -> str:
    """The fields that have a value, as JSON; '' when there are none."""
    there = {name: value for name, value in fields.items() if value not in (None, "")}
    return json.dumps(there, sort_keys=True, ensure_ascii=True, default=str) if there else ""


def pick(row: Any, field: str) -> Any:
    """The value of `field` in a JSON object; of 'a.b', unless that is a field, that of b in a. None when it is absent."""
    if not isinstance(row, dict):
        return None
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    return pick(row.get(outer), inner) if dot else None


def poisoned(error: BaseException) -> bool:
    """Whether `error` was caused by the input, so that the document or file is set aside and reading continues.

    A panic of a Rust library is a BaseException that is not an Exception.
    """
    if isinstance(error, HoneError | MemoryError | ModuleNotFoundError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def settle(text: str) -> tuple[str, str]:
    """(the reason why `text` is not a document, or ''; the text as stored)."""
    if "\0" in text:
        if text.count("\0") > max(1.0, MAX_NULS * len(text)):
            return "binary", text
        text = text.replace("\0", "")
    if not text.isascii():
        try:
            text.encode("utf8")
        except UnicodeEncodeError:
            return "lone_surrogate", text
        read = text
        if _SUSPECT.search(text):
            text, num_left = repaired(text)
            if num_left > MAX_LEFT * len(text):
                return "mojibake", read
        if text.count("\ufffd") > MAX_REPLACED * len(text):
            return "wrong_encoding", read
        if is_piled(text):
            return "piled_marks", read
    text = normalize(text)
    return ("", text) if text.strip() else ("empty", text)


def repaired(text: str) -> tuple[str, int]:
    """(`text` after ftfy has repaired UTF-8 that was read in another encoding, the number of suspect places left).

    Raises MissingExtra without ftfy.
    """
    try:
        from ftfy import fix_encoding
        from ftfy.badness import badness
    except ImportError:
        raise MissingExtra.of("repairing text in the wrong encoding", "ftfy", "data") from None
    text = fix_encoding(_CUT_QUOTE.sub("\u201d", text))  # ftfy would turn it and the space after it into a dagger
    return text, badness(text)


def identify(name: str, number: int) -> str:
    """The id of document `number` of the file called `name`: sixteen hex digits."""
    return hashlib.blake2b(f"{name}#{number}".encode(), digest_size=8).hexdigest()


def identify_all(name: str, numbers: Sequence[int]) -> list[str]:
    """The ids of several documents of one file."""
    start = hashlib.blake2b(f"{name}#".encode(), digest_size=8)
    ids = []
    for number in numbers:
        one = start.copy()
        one.update(b"%d" % number)
        ids.append(one.hexdigest())
    return ids


def family_of(file: File, ident: str) -> int:
    """The family of a document, which is kept in one split: the module for Python's library, else the document itself."""
    if file.format != "python":
        return int(ident, 16)
    return int(hashlib.blake2b(file.name.encode(), digest_size=8).hexdigest(), 16)


def group_of(file: File, kind: str) -> str:
    """The group of a file in statistics: sort of library text, top folder, or the file itself."""
    if file.format == "python":
        return "library sources" if kind == "code" else "library docstrings"
    top, slash, _ = file.name.partition("/")
    return top + slash
