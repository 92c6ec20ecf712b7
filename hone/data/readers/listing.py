"""Listing: which files a source consists of, in a fixed order, and what each is read as."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hone.base.errors import SpecError
from hone.base.spec import fingerprint

PYTHON = "python"
FORMATS: dict[str, str] = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "code",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".warc": "warc",
    ".wet": "warc",
}
"""File name ending to reader; each may be followed by one of COMPRESSIONS, parquet excepted."""
COMPRESSIONS = (".gz", ".zst")

# Parts of a Python installation that are no library text: other people's packages, tests, byte tables, build settings.
_NO_LIBRARY = frozenset(
    [
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "lib-dynload",
        "encodings",
        "_bundled",
    ]
)
_LIBRARY_TEXTS = (".txt", ".rst", ".md")


@dataclass(frozen=True)
class File:
    """One input file. `name` is its path inside the source ('/' between parts), the only one that leaves this room."""

    path: Path
    name: str
    size: int
    format: str
    compression: str = ""


@dataclass
class Listing:
    """What was found: `files` to read, `skipped` endings with counts, `broken` (name, reason) of what cannot be opened."""

    files: list[File] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Names and sizes of all files: a resumed stage must find the input it began with."""
        return fingerprint([[file.name, file.size] for file in self.files])


def list_source(source: str) -> Listing:
    """The files of `source`: 'python' or a path. Raises SpecError when there is no such path or no file to read in it."""
    if source == PYTHON:
        listing = _python_library()
        where = f"the library of this Python ({sysconfig.get_paths()['stdlib']})"
    else:
        root = Path(source).expanduser()
        if not root.exists():
            raise SpecError(f"source {source}: there is no such file or folder", fix="check the path, or use 'python'")
        listing = _walk(root)
        where = str(source)
    listing.files.sort(key=lambda file: file.name)
    listing.broken.sort()
    if not listing.files:
        endings = ", ".join(f"{count} {ending}" for ending, count in listing.skipped.most_common(5))
        refused = ", ".join(f"{name}: {reason}" for name, reason in listing.broken[:3])
        raise SpecError(
            f"{where} holds no file hone can read (skipped: {endings or 'nothing'}; refused: {refused or 'nothing'})",
            fix=f"give files ending in {' '.join(FORMATS)}, text and jsonl and warc also with .gz or .zst",
        )
    return listing


def _python_library() -> Listing:
    listing = _walk(Path(sysconfig.get_paths()["stdlib"]), skip=_NO_LIBRARY)
    kept = []
    for file in listing.files:
        base = file.name.rsplit("/", 1)[-1]
        # _sysconfigdata describes this one machine; config-3.x-... holds the build's makefile.
        if base.startswith("_sysconfigdata") or file.name.startswith("config-"):
            continue
        if file.format == "code" or base.endswith(_LIBRARY_TEXTS):
            kept.append(File(file.path, file.name, file.size, "python" if file.format == "code" else file.format))
    listing.files = kept
    return listing


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Listing:
    """All regular files at or below `root`, symbolic links followed, each folder once (a loop of links ends)."""
    listing = Listing()
    if not root.is_dir():
        _add(listing, root, root.name)
        return listing
    seen: set[tuple[int, int]] = set()
    pending = [(root, "")]
    while pending:
        folder, prefix = pending.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            listing.broken.append((_printable(prefix) or ".", _reason(error)))
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in skip:
                continue
            if entry.is_dir():
                pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
            else:
                _add(listing, Path(entry.path), f"{prefix}{entry.name}")
    return listing


def _add(listing: Listing, path: Path, name: str) -> None:
    """Puts one file where it belongs. Only regular files are opened: a pipe would block for ever."""
    name = _printable(name)
    try:
        status = path.stat()
    except OSError as error:
        listing.broken.append((name, _reason(error)))
        return
    endings = list(_endings(name))
    if not stat.S_ISREG(status.st_mode):
        listing.skipped["(no regular file)"] += 1
    elif not endings:
        listing.skipped[path.suffix.lower() or "(no ending)"] += 1
    else:
        listing.files.append(File(path, name, status.st_size, *endings[0]))


def _endings(name: str) -> Iterator[tuple[str, str]]:
    """(format, compression) that the file name stands for, if it stands for one."""
    lowered = name.lower()
    for compression in ("", *COMPRESSIONS):
        bare = lowered.removesuffix(compression)
        if compression and bare == lowered:
            continue
        for ending, format_ in FORMATS.items():
            if bare.endswith(ending) and not (compression and format_ == "parquet"):
                yield format_, compression


def _printable(name: str) -> str:
    """A file name that is no valid UTF-8 must not break JSON later."""
    return name.encode("utf8", "surrogateescape").decode("utf8", "replace")


def _reason(error: OSError) -> str:
    return {PermissionError: "no_permission", FileNotFoundError: "dangling_link"}.get(type(error), "unreadable")
