"""Texts as they are: plain text, rows of JSONL, JSON and Parquet, folders of them, data sets of the hub, conversations by the model's chat template.

The readers of the data stage judge and repair what they read, with kernels that are compiled first. A calibration and an
evaluation need a few megabytes as they are, so rows are read plainly here, from the same files and streams. `field` is the
spec's field that names the source, for messages.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.feed import ROWS
from hone.feed.chat import FIELDS, ROLES
from hone.feed.files import listing, sniff, streams
from hone.feed.files.kinds import COMPRESSIONS, UNKNOWN, kind_of
from hone.feed.files.remote import is_remote

if TYPE_CHECKING:
    from hone.feed.files.listing import File
    from hone.model.tokenizer import Tokenizer


_PLAIN = ("text", "code", "tex", UNKNOWN)
"""Formats that are text as they stand."""
_JSON = "json"
_BROKEN = ("LZMAError", "ZstdError", "Unreadable")
_EXPANSION = 3.0
"""Bytes of text of a byte in a Parquet table, or in a compressed file elsewhere, of which nothing is read to estimate how much
there is."""
_SAMPLE = 1 << 19
"""Bytes of a compressed file that are decompressed for that; of bzip2 less than a block has no text yet."""
_NAMED = 3
"""Files that are left out of which each has a note of its own."""
_OTHER_FIELD = (
    "read it with `hone data FILE --text_field=NAME --tokenizer.path=MODEL --out=DATA`, and give that: --from.data=DATA"
)
_WAY = "read it with `hone data FILE --tokenizer.path=MODEL --out=DATA`, and give that: --from.data=DATA"


class NotUnicode(SpecError):
    """A plain file in another encoding than UTF-8."""


@dataclass
class Texts:
    """Documents in the order of their files; `whole` is the text of a single plain file. `notes`: what a user must know."""

    documents: list[str]
    special: bool = False
    """Whether the documents hold their special tokens already, as a chat template writes them."""
    whole: bool = False
    notes: list[str] = field(default_factory=list)
    first: int | None = None
    """Bytes after which reading stopped; None when everything was read."""

    @property
    def digest(self) -> str:
        """SHA-256 of the documents, of a plain file of its bytes."""
        end = b"" if self.whole else b"\0"
        return hashlib.sha256(end.join(text.encode("utf8", "surrogatepass") for text in self.documents)).hexdigest()


def files_of(source: str, field: str) -> list[File]:
    """The files of `source` that are texts. Raises SpecError when there are none, naming the way for other formats."""
    path = Path(source).expanduser()
    if (path / "tokens" / "meta.json").exists():
        raise SpecError(f"{field} {source} is a data set of hone", fix=f"give it as data: --from.data={source}")
    if not is_remote(source) and not path.is_dir() and not any(letter in source for letter in "*?["):
        try:
            file = _told_by_content(listing.File(path, path.name, path.stat().st_size, *_kind_of(path.name)))
        except OSError as error:
            raise SpecError(f"{field} {source}: {error.strerror}", fix="name a text file") from None
        if file.format not in (*_PLAIN, *ROWS):
            raise SpecError(f"{field} {source} is {file.format}", fix=f"give text, JSONL, JSON or Parquet; else {_WAY}")
        return [file]
    try:
        found = listing.list_source(source).files
    except SpecError as error:
        raise SpecError(f"{field}: {error.what}", fix=error.fix) from None
    able = [file for file in found if file.format in (*_PLAIN, *ROWS) and file.format != _JSON]
    # Beside others a JSON file describes them.
    able = able or [file for file in found if file.format == _JSON]
    if not able:
        kinds = ", ".join(sorted({file.format for file in found}))
        raise SpecError(f"{field} {source} holds {kinds} alone", fix=f"give text, JSONL, JSON or Parquet; else {_WAY}")
    return able


def _kind_of(name: str) -> tuple[str, str]:
    """Format and compression of a file by its name; of an ending that ROWS names, the ending."""
    last = next((ending for ending in COMPRESSIONS if name.lower().endswith(ending)), "")
    own = Path(name.lower().removesuffix(last)).suffix
    return (own, COMPRESSIONS.get(last, "")) if own in ROWS else kind_of(name) or (UNKNOWN, "")


def _told_by_content(file: File) -> File:
    """`file`, compressed or as rows where its content is and its name does not say so: caches name files by their hash.

    Of an ending that is not known the content is text otherwise, or not UTF-8. Raises OSError as reading does.
    """
    if file.compression or file.format not in (UNKNOWN, "text", "jsonl"):
        return file
    found = sniff.sniffed(file) or file
    return found if found.compression or (file.format == UNKNOWN and found.format in ("jsonl", "parquet")) else file


def local_files(source: str, field: str) -> dict[str, Path]:
    """The files of `source` on this machine by a name of each: none of the hub's, and none where there is no such file."""
    path = Path(source).expanduser()
    if is_remote(source) or not _is_several(source):
        return {field: path} if path.is_file() else {}
    return {f"{field}/{file.name}": file.path for file in files_of(source, field)}


def _is_several(source: str) -> bool:
    """Whether a source is a folder, a pattern or a data set of the hub, not one file."""
    return is_remote(source) or Path(source).expanduser().is_dir() or any(letter in source for letter in "*?[")


def num_bytes(source: str, field: str) -> float:
    """About how many bytes of text `source` holds. Raises SpecError as `files_of`."""
    files, ratios = files_of(source, field), {"": 1.0}
    for file in files:
        if file.compression not in ratios:
            ratios[file.compression] = _ratio(file)
    return sum(file.size * (_EXPANSION if file.format == "parquet" else ratios[file.compression]) for file in files)


def _ratio(file: File) -> float:
    """Bytes of text of a byte in a compressed file, by the beginning of it."""
    if file.url:
        return _EXPANSION
    try:
        start = len(streams.head(file, _SAMPLE))
    except Exception as error:
        if not _is_broken(error):
            raise
        return _EXPANSION  # reading it says what is wrong
    return start / min(file.size, _SAMPLE) if start and file.size else _EXPANSION


def read(source: str, field: str, tokenizer: Tokenizer, most: float) -> Texts:
    """The documents of `source`, at most about `most` bytes of them, in the order of the files.

    Raises SpecError when there is none, when a plain file is not UTF-8, or when rows are conversations and the model has no
    chat template.
    """
    files = files_of(source, field)
    if len(files) == 1 and files[0].format in _PLAIN:
        return Texts([_plain(files[0], field)], whole=True)
    documents: list[str] = []
    notes: list[str] = []
    chats, size, problems = 0, 0, Counter[str]()
    reads = (item for file in files for item in _documents(file, field, tokenizer, problems, notes))
    for text, is_chat in reads:
        documents.append(text)
        chats += is_chat
        size += len(text)
        if size >= most:
            break
    if not documents:
        why = "; ".join([*notes, *(problem for problem, _ in problems.most_common(3))][:3]) or "it is empty"
        raise SpecError(
            f"{field} {source} has no text: {why}", fix=f"give rows with a field text or messages; else {_OTHER_FIELD}"
        )
    if 0 < chats < len(documents):
        raise SpecError(
            f"{field} {source} has {chats} conversations and {len(documents) - chats} texts",
            fix="give one of the two: conversations hold special tokens that texts get",
        )
    notes = notes[:_NAMED] + ([f"and {len(notes) - _NAMED} other files are left out"] if notes[_NAMED:] else [])
    notes += [f"{count} rows of {source} are left out: {problem}" for problem, count in problems.most_common(3)]
    return Texts(documents, special=bool(chats), notes=notes, first=size if size >= most else None)


def _documents(
    file: File, field: str, tokenizer: Tokenizer, problems: Counter[str], notes: list[str]
) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a conversation) of every document of a file among several; what is none is counted in `problems`.

    A plain file that is not UTF-8 is left out, which `notes` say.
    """
    if file.format in _PLAIN:
        try:
            yield _plain(file, field), False
        except NotUnicode as error:
            notes.append(f"{file.name} is left out: {error.what.partition(' is ')[2]}; {error.fix}")
        return
    for row in _rows(file, field, problems):
        try:
            found = _text_of(row, field, tokenizer)
        except SpecError as error:
            if not tokenizer.has_chat_template:
                raise
            problems[error.what] += 1
            continue
        if found is None and "text" in row:
            problems[f"text is {json.dumps(row['text'], default=str)[:40]}, which is no string"] += 1
        elif found is None:
            problems[f"no field text or messages, but {', '.join(sorted(row)[:6]) or 'nothing'}"] += 1
        elif not _is_unicode(found[0]):
            problems["half a surrogate pair, which no tokenizer takes"] += 1
        elif found[0].strip():
            yield found


def _text_of(row: dict[str, Any], field: str, tokenizer: Tokenizer) -> tuple[str, bool] | None:
    """The text of a row. Raises SpecError when it is a conversation that the chat template does not take, or there is none."""
    if isinstance(row.get("text"), str):
        return row["text"], False
    for name in FIELDS:
        messages = row.get(name)
        if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
            if not tokenizer.has_chat_template:
                raise SpecError(
                    f"{field} has conversations ({name}), and this model has no chat template to write them with",
                    fix=f"give texts like those that the model will see, or {_WAY}",
                )
            variables = {"tools": row["tools"]} if row.get("tools") else {}
            return tokenizer.chat([_message(one) for one in messages], add_generation_prompt=False, **variables), True
    return None


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold half of a surrogate pair."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return False
    return True


def _message(said: dict[str, Any]) -> dict[str, Any]:
    """A message under the names of chat templates; older data sets have `from` and `value`."""
    if "role" in said or "from" not in said:
        return {name: value for name, value in said.items() if value is not None}
    return {"role": ROLES.get(said["from"], said["from"]), "content": said.get("value")}


def _rows(file: File, field: str, problems: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file of a format in ROWS."""
    with _opened(file, field) as stream:
        for row in resolve(ROWS[file.format])(stream, problems):
            if isinstance(row, dict):
                yield row
            else:
                problems["no JSON object"] += 1


def _plain(file: File, field: str) -> str:
    """The text of a plain file. Raises SpecError when it is not UTF-8."""
    with _opened(file, field) as stream:
        raw = stream.read()
    try:
        return raw.decode("utf-8-sig")  # some editors begin a text with a mark
    except UnicodeDecodeError as error:
        raise NotUnicode(f"{field} {file.path} is not UTF-8: {error}", fix=f"give it as UTF-8, or {_WAY}") from None


@contextmanager
def _opened(file: File, field: str) -> Iterator[Any]:
    """A file's decompressed bytes. Raises SpecError with the file's name when they end early or cannot be read."""
    try:
        with streams.open_stream(file) as stream:
            yield stream
    except Exception as error:
        if not _is_broken(error):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{field} {file.name}: {why}", fix="give a file that is whole and can be read") from None


def _is_broken(error: Exception) -> bool:
    """Whether an error of reading a file comes from the file."""
    return isinstance(error, (OSError, EOFError, zlib.error)) or type(error).__name__ in _BROKEN
