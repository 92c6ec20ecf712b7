"""Read: documents from files, one by one or in batches; broken input is returned with its reason and never stops the rest."""

from __future__ import annotations

import gzip
import io
import json
import tokenize
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hone.base.errors import MissingExtra
from hone.base.lazy import resolve
from hone.base.store import unreachable
from hone.feed.chat import rendered
from hone.feed.conversations.spec import CONVERSATION
from hone.feed.files.code import fault_of, language_of
from hone.feed.files.kinds import CONTAINERS, TABLES, UNKNOWN
from hone.feed.files.listing import File
from hone.feed.files.remote import is_lost
from hone.feed.files.sniff import sniffed
from hone.feed.files.streams import Unreadable, read_whole, zstandard
from hone.readers.docstrings import prose_of, questions_in
from hone.readers.documents import (
    BLOCK_BYTES,
    NUL_REMOVED,
    SAMPLE_CHARS,
    Batch,
    Broken,
    Document,
    Fault,
    Noted,
    Options,
    RawText,
    Rows,
    family_of,
    group_of,
    identify,
    identify_all,
    poisoned,
    settle,
)
from hone.readers.encodings import decode_text
from hone.readers.formats.containers import document_in
from hone.readers.pages import Fast, page_text
from hone.text.batch import Texts
from hone.text.signals.code import ROW


def read_file(file: File, options: Options) -> Iterator[Document | Broken | Noted]:
    """Every document of `file`, a Broken for everything in it that should be one and is not, a Noted for what is counted only.

    Raises only MissingExtra when a package is not installed and MachineError when a remote file cannot be reached.
    """
    for item in _items(file, options):
        if isinstance(item, Batch):
            yield from item.documents()
        else:
            yield item


def read_batches(file: File, options: Options) -> Iterator[Batch | Broken | Noted]:
    """The same documents in the same order as read_file, about BLOCK_BYTES of text at a time.

    The rows of jsonl and Parquet files are not converted to Python strings unless they are irregular.
    """
    waiting: list[Document] = []
    num_chars = 0
    for item in _items(file, options):
        if isinstance(item, Document):
            waiting.append(item)
            num_chars += len(item.text)
            if num_chars >= BLOCK_BYTES:
                yield _gathered(waiting)
                waiting, num_chars = [], 0
        else:
            yield item
    if waiting:
        yield _gathered(waiting)


def _gathered(documents: list[Document]) -> Batch:
    ids, texts, sources, groups, kinds, families, urls, metadata = map(list, zip(*documents))
    return Batch(Texts.of(texts), ids, sources, groups, kinds, families, urls, metadata)


def _items(file: File, options: Options) -> Iterator[Document | Batch | Broken | Noted]:
    """The content of `file`: rows as batches, everything else document by document. An error that ends it early loses the unread bytes."""
    found = False
    num_bytes = 0
    items = _numbered(file, options)
    while True:
        try:
            item = next(items, None)
        except Unreadable as stop:
            yield Fault(*stop.args, max(file.size - num_bytes, 0)).broken(file.name)
            return
        except ModuleNotFoundError as error:  # every file of this format would fail
            raise _missing(f"reading {file.name} as {file.format}", error) from None
        except BaseException as error:
            if not poisoned(error):
                raise
            if file.url and is_lost(error):  # the connection failed, not the file
                raise unreachable(file.url, error) from None
            yield Fault(_reason(error), str(error), max(file.size - num_bytes, 0)).broken(file.name)
            return
        if item is None:
            if not found and file.part is None:  # a part may be inside one long line
                yield Broken("empty", file.name, "", file.size)
            return
        found = True
        num_bytes += _size(item)
        yield item


def need_packages(files: Sequence[File]) -> None:
    """Raises MissingExtra when a package that reads one of `files` is not installed; members of containers are not known yet."""
    first = {file.format: file for file in reversed(files)}
    for format in first.keys() & _PACKAGES.keys():
        MissingExtra.need(f"reading {first[format].name} as {format}", _PACKAGES[format], "data")
    if any(file.compression == ".zst" for file in files):
        zstandard()


def _missing(what: str, error: ModuleNotFoundError) -> MissingExtra:
    package = (error.name or "").partition(".")[0]
    return MissingExtra(
        f"{what} needs the package '{package}', which is not installed: {error}",
        fix=f"pip install 'hone-llm[data]', or {package} where it is no package of hone's",
    )


def _size(item: Document | Batch | Broken | Noted) -> int:
    """Bytes of the texts in it."""
    if isinstance(item, Noted):
        return 0
    if isinstance(item, Broken):
        return item.num_bytes
    if isinstance(item, Batch):
        return item.texts.num_bytes
    return len(item.text) if item.text.isascii() else len(item.text.encode())


def _numbered(file: File, options: Options) -> Iterator[Document | Batch | Broken | Noted]:
    """Documents with their ids. A text that is set aside counts too, so that the others keep their numbers."""
    number = 0
    for item in resolve(_READERS[file.format])(file, options):
        if isinstance(item, Fault):
            yield item.broken(file.name)
            number += item.numbered
        elif isinstance(item, Noted):
            yield item
        elif isinstance(item, File):
            yield from _items(item, options)
        elif isinstance(item, Rows):
            yield from _batch(item, file)
        else:
            reason, text = settle(item.text)
            if reason:
                shown = "" if reason == "empty" else text
                yield Fault(reason, shown, len(text.encode("utf8", "replace"))).broken(file.name)
            else:
                ident = identify(file.name, number)
                group, family = group_of(file, item.kind), family_of(file, ident)
                kind = ROW if file.format in TABLES and item.kind == "prose" else item.kind
                if "\0" in item.text:
                    yield NUL_REMOVED
                yield Document(ident, text, file.name, group, kind, family, item.url, item.metadata)
            number += 1


def _batch(rows: Rows, file: File) -> Iterator[Batch | Broken | Noted]:
    """Rows of `file`, numbered by their positions, as documents in columns; then those that are not documents."""
    from hone.readers.sound import settle_batch  # its kernels are compiled on use

    texts, kept, faults = settle_batch(rows.texts)
    if len(kept):
        ids = identify_all(file.name, rows.places[kept].tolist())
        urls, metadata = (_picked(column, kept) for column in (rows.urls, rows.metadata))
        same = ([value] * len(ids) for value in (file.name, group_of(file, "prose"), ROW))
        yield Batch(texts, ids, *same, [int(ident, 16) for ident in ids], urls, metadata)
    for fault in faults:
        yield fault if isinstance(fault, Noted) else fault.broken(file.name)


def _picked(column: list[str] | None, kept: Any) -> list[str]:
    """The values of a column at the indices `kept`."""
    if column is None:
        return [""] * len(kept)
    return column if len(column) == len(kept) else [column[index] for index in kept]


def _reason(error: BaseException) -> str:
    """A one-word reason for an error in a file."""
    if isinstance(error, PermissionError):
        return "no_permission"
    if isinstance(error, FileNotFoundError):
        return "gone"
    if isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, UnicodeError):
        return "wrong_encoding"
    if isinstance(error, gzip.BadGzipFile | zlib.error) or type(error).__name__ == "ZstdError":
        return "bad_compression"
    if isinstance(error, OSError):
        return "unreadable"
    return f"failed_{type(error).__name__}"


def _read_code(file: File, options: Options) -> Iterator[RawText | Fault]:
    """A source file, with its language and licence as metadata. Generated files are set aside."""
    language = language_of(file.name)
    raw = read_whole(file)
    source = _python_text(raw) if language == "python" else decode_text(raw, options.encoding)
    fault = fault_of(file.name, source)
    if fault:
        yield Fault(fault, source[:SAMPLE_CHARS], len(raw))
        return
    about = {"language": language, **({"licence": file.licence} if file.licence else {})}
    yield RawText(source, "code", metadata=json.dumps(about, sort_keys=True))


def _read_python(file: File, options: Options) -> Iterator[RawText]:
    """A module of the Python library: its prose, then its source; of conversations a question about each thing that it documents."""
    source = _python_text(read_whole(file))
    if options.chat:
        for question, answer in questions_in(source, file.name):
            row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            yield RawText(rendered(row["messages"]) or "", metadata=json.dumps({CONVERSATION: row}))
        return
    for text in prose_of(source, file.name):
        yield RawText(text)
    if not file.name.endswith("pydoc_data/topics.py"):
        yield RawText(source, "code")


def _python_text(raw: bytes) -> str:
    """Python source in the encoding it declares (PEP 263)."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    except SyntaxError:
        raise Unreadable("wrong_encoding", "") from None
    return raw.decode(encoding)


def _read_html(file: File, options: Options) -> Iterator[RawText]:
    yield RawText(page_text(read_whole(file), options.extractor or Fast()))


def _read_unknown(file: File, options: Options) -> Iterator[File | Noted]:
    """A file without an ending, in the format of its content."""
    known = sniffed(file)
    if known is not None and known.format == "zip":
        known = replace(known, format=document_in(known) or "zip")
    yield known or Noted("(no ending)")


_PACKAGES = {"html": "resiliparse", "epub": "resiliparse", "warc": "fastwarc", "pdf": "pypdfium2"}
"""The package that reads each format, of those that only the extra 'data' installs; without it no file of the format can be read."""
_READERS = {
    "text": "hone.readers.texts:read_text",
    "code": "hone.readers.read:_read_code",
    "python": "hone.readers.read:_read_python",
    "html": "hone.readers.read:_read_html",
    "jsonl": "hone.readers.json_rows:read_jsonl",
    "json": "hone.readers.json_rows:read_json",
    "csv": "hone.readers.formats.csv_rows:read_csv",
    "parquet": "hone.readers.tables:read_parquet",
    "arrow": "hone.readers.tables:read_arrow",
    "warc": "hone.readers.archives:read_archive",
    "pdf": "hone.readers.formats.pdf:read_pdf",
    "docx": "hone.readers.formats.office:read_docx",
    "odt": "hone.readers.formats.office:read_odt",
    "epub": "hone.readers.formats.office:read_epub",
    "xml": "hone.readers.formats.xml:read_xml",
    "ipynb": "hone.readers.formats.markup:read_notebook",
    "tex": "hone.readers.formats.markup:read_tex",
    "eml": "hone.readers.formats.mail:read_eml",
    "mbox": "hone.readers.formats.mail:read_mbox",
    **dict.fromkeys(CONTAINERS, "hone.readers.formats.containers:read_container"),
    UNKNOWN: "hone.readers.read:_read_unknown",
}
"""The reader of each format, imported on use: (file, options) to an iterator of RawText, Rows, File, Fault and Noted."""
