"""Reading files written by tests: texts, reasons of what was set aside, and what was counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hone.feed.files.listing import list_source
from hone.readers.documents import Batch, Broken, Document, Noted, Options
from hone.readers.parts import parts
from hone.readers.read import read_batches, read_file

Item = Document | Broken | Noted


def items(path: Path, format: str = "", part_bytes: int | None = None, **options) -> list[Item]:
    """What is in the files at `path`, after checking that batches hold the same documents."""
    chosen = Options(**options)
    files = [cut for file in list_source(str(path), format).files for cut in parts(file, chosen, part_bytes)]
    alone = [item for file in files for item in read_file(file, chosen)]
    batched = [item for file in files for item in read_batches(file, chosen)]
    together = [one for item in batched if isinstance(item, Batch) for one in item.documents()]
    assert sorted(together) == sorted(item for item in alone if isinstance(item, Document))
    return alone


def texts(path: Path, **options) -> list[str]:
    return [item.text for item in items(path, **options) if isinstance(item, Document)]


def reasons(path: Path, **options) -> list[str]:
    return [item.reason for item in items(path, **options) if isinstance(item, Broken)]


def noted(path: Path, **options) -> dict[str, int]:
    found = Counter[str]()
    for item in items(path, **options):
        if isinstance(item, Noted):
            found[item.what] += item.count
    return dict(found)


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
