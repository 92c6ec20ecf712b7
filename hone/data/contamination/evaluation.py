"""Evaluation sets from files and folders: JSON lines, JSON, CSV, TSV, Parquet and text; every row is an example."""

from __future__ import annotations

import csv
import gzip
import io
import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hone.base.durable import input_file
from hone.base.errors import MissingExtra, SpecError

_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")


class Example(NamedTuple):
    """One example: the name of its evaluation set, its row in the set's file (from 0), and its texts, NFC-normalized."""

    evaluation: str
    row: int
    texts: tuple[str, ...]


_ASKS = (
    "question", "query", "context", "ctx", "ctx_a", "ctx_b", "prompt", "passage", "problem", "stem", "premise", "goal", "input", "text",
)  # fmt: skip
_ANSWERS = ("answer", "continuation", "target", "solution", "output", "completion", "hypothesis")
_LABELS = frozenset(
    {
        "id", "ind", "idx", "index", "uid", "guid", "qid", "hash", "split", "split_type", "source", "source_id", "subject",
        "category", "topic", "activity_label", "label", "labels", "answer_key", "answerkey", "target_idx", "gold", "level", "type",
        "lang", "language", "license", "url", "difficulty",
    }
)  # fmt: skip
"""Fields that say something about an example and are no part of its text."""


def read_evaluations(paths: tuple[str, ...], fields: tuple[str, ...], items: bool = False) -> list[Example]:
    """All examples of the files `paths`, and of all files below those that are folders, in order of names.

    The texts of a row are the strings in its `fields` (all fields when none are named), also those in lists and mappings. In a
    CSV file without a header, fields are column numbers from 0. With `items` the texts are those of an item in the order in which it is
    asked: question, choices, answer; without `fields`, labels such as ids and letters of answers are left out. Raises SpecError for a file that is missing, unreadable, or has
    none of the fields.
    """
    return [example for name, file in labelled(paths) for example in _examples(name, file, fields, items)]


def labelled(paths: tuple[str, ...]) -> list[tuple[str, Path]]:
    """(label, file) of the evaluation files at or below `paths`, each file once; a label is the file's name, after as many
    parent folders as make it unique."""
    names: dict[Path, str] = {}
    for path in paths:
        for name, file in evaluation_files(path):
            names.setdefault(file.absolute(), name)
    labels = dict(names)
    while True:
        files = defaultdict(list)
        for file, label in labels.items():
            files[label].append(file)
        same = [file for group in files.values() if len(group) > 1 for file in group]
        if not same:
            return [(label, file) for file, label in labels.items()]
        for file in same:
            longer = file.parts[-len(Path(labels[file]).parts) - 1 :]
            labels[file] = Path(*longer).as_posix()


def evaluation_files(path: str) -> list[tuple[str, Path]]:
    """(name, file) of the evaluation files at or below `path`. Raises SpecError when there is none."""
    root = Path(path).expanduser()
    if not root.is_dir():
        return [(root.name, input_file(root, "evaluation set"))]
    files = sorted(file for file in root.rglob("*") if file.is_file() and _ending(file))
    if not files:
        raise SpecError(
            f"evaluation set {path} holds no evaluation file",
            fix=f"give files or folders of {' '.join(_ENDINGS)} (or .gz)",
        )
    return [(file.relative_to(root).as_posix(), file) for file in files]


def _ending(file: Path) -> str:
    """The suffix that gives the format of `file`, '' for an unknown format."""
    name = file.name.lower().removesuffix(".gz")
    return next((ending for ending in _ENDINGS if name.endswith(ending)), "")


def _examples(name: str, file: Path, fields: tuple[str, ...], items: bool) -> Iterator[Example]:
    found = False
    rows = 0
    try:
        for number, row in enumerate(_rows(file, fields)):
            rows += 1
            if isinstance(row, dict) and fields:
                found |= any(field in row for field in fields)
                row = [row[field] for field in fields if field in row]
            else:
                found = True
            if items and isinstance(row, dict) and not fields:
                row = _asked(row)
            texts = tuple(unicodedata.normalize("NFC", text) for text in _strings(row))
            if items:
                texts = tuple(text for text in texts if len(text.strip()) > 1)
            yield Example(name, number, tuple(text.encode("utf8", "replace").decode() for text in texts))
    except (OSError, ValueError, EOFError, csv.Error) as error:
        raise SpecError(
            f"evaluation set {name}, row {rows}: {error}", fix="give it as UTF-8, one example a row"
        ) from None
    if not rows:
        raise SpecError(f"evaluation set {name} is empty", fix="leave it out or give the right file")
    if not found:
        raise SpecError(
            f"evaluation set {name} has none of the fields {', '.join(fields)}", fix=f"its fields are: {_names(file)}"
        )


def _asked(row: dict[str, Any]) -> list[Any]:
    """The values of a row in the order question, others, answer, without labels; nested mappings likewise."""
    names = [name for name in row if str(name).lower() not in _LABELS]
    names.sort(key=lambda name: 0 if str(name).lower() in _ASKS else 2 if str(name).lower() in _ANSWERS else 1)
    return [_asked(row[name]) if isinstance(row[name], dict) else row[name] for name in names]


def _names(file: Path) -> str:
    row = next(_rows(file, ()))
    return ", ".join(map(str, row)) if isinstance(row, dict) else "none: its rows are plain strings"


def _rows(file: Path, fields: tuple[str, ...]) -> Iterator[Any]:
    """The rows of a file: mappings, or lists of cells, or lines."""
    ending = _ending(file)
    if ending == ".parquet":
        yield from _parquet(file)
        return
    if not ending:
        raise SpecError(f"evaluation set {file.name}: unknown format", fix=f"give {' '.join(_ENDINGS)} (or .gz)")
    with gzip.open(file) if file.name.lower().endswith(".gz") else open(file, "rb") as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="" if ending in (".csv", ".tsv") else None)  # type: ignore[arg-type]
        if ending == ".json":
            whole = json.load(text)
            yield from whole if isinstance(whole, list) else [whole]
        elif ending == ".jsonl":
            yield from (json.loads(line) for line in text if line.strip())
        elif ending == ".txt":
            yield from (line for line in text if line.strip())
        else:
            cells = csv.reader(text, delimiter="\t" if ending == ".tsv" else ",")
            if not fields:
                yield from cells
            elif all(field.isdigit() for field in fields):
                yield from (dict(zip(map(str, range(len(row))), row)) for row in cells)
            else:
                header = next(cells, [])
                yield from (dict(zip(header, row)) for row in cells)


def _parquet(file: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtra.of("reading Parquet", "pyarrow", "data") from None
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from None


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
