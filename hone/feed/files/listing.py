"""Listing: the files of a source in a fixed order, and the format in which each is read."""

from __future__ import annotations

import glob
import itertools
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from hone.base.durable import input_file
from hone.base.errors import SpecError
from hone.base.spec import fingerprint
from hone.feed.files.code import LICENCE_FILES, is_vendored, licence_of
from hone.feed.files.kinds import READABLE, ending_of, kind_of
from hone.feed.files.remote import find, fixed, is_remote

PYTHON = "python"
SEEN = "input.seen"
"""File in the log of a data artifact, not part of its content: `Listing.seen` of its source."""
# Parts of a Python installation that are not library text: third-party packages, tests, byte tables, build settings.
_NO_LIBRARY = frozenset([
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "lib-dynload", "encodings",
    "_bundled",
])  # fmt: skip
_LICENCE_BYTES = 200_000
_HIDDEN = "(hidden)"
_LIBRARY_TEXTS = (".txt", ".rst", ".md")


@dataclass(frozen=True)
class File:
    """One input file. `name` is its path inside the source ('/' between parts), the only path that goes into artifacts.

    `url` is the address of a remote file, `licence` that of the nearest licence file above a source file. `part` is the
    range of the file to read (bytes of jsonl, row groups of Parquet, members of a zip), and `size` its bytes; None: all of
    it. `version` is its modification time, or a remote store's version of it. `held` opens a member of a container, in the
    process that reads it; `forced` is the format of a container's members, '' for that of their names; `depth`
    is the number of containers around it.
    """

    path: Path
    name: str
    size: int
    format: str
    compression: str = ""
    url: str = ""
    licence: str = ""
    part: tuple[int, int] | None = None
    version: str = ""
    held: Callable[[], IO[bytes]] | None = field(default=None, repr=False, compare=False)
    forced: str = ""
    depth: int = 0


@dataclass
class Listing:
    """The result of listing: `files` to read, `skipped` suffixes with counts, `broken` (name, reason) of files that cannot be opened.

    `licences` maps the name of each licence file to its licence; `forced` is the format that the user gave for all files.
    """

    files: list[File] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[str, str]] = field(default_factory=list)
    licences: dict[str, str] = field(default_factory=dict)
    forced: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Names and sizes of all files: the same for a corpus that was copied."""
        return fingerprint([[file.name, file.size] for file in self.files])

    @property
    def seen(self) -> str:
        """Names, sizes and versions: changes when a file was rewritten, also with the same size, or copied."""
        return fingerprint([[file.name, file.size, file.version] for file in self.files])


def list_source(source: str | Sequence[str], format: str = "") -> Listing:
    """The files of `source`: 'python', a path or URL (with `*`, `?`, `[` too), 'hf:owner/name[:config][:split]', or several of them.

    With several sources, each file's name begins with its source's; of two sources of one name the second is NAME-2, unless a third
    has that name. Raises SpecError when a source does not exist or has no readable
    file, MissingExtra and MachineError for remote ones. `format`, one of NAMES, is that of all files but hidden ones, and of
    the members of zip and tar files; '' takes each file's from its ending, and else from its content.
    """
    if isinstance(source, str):
        return _list_one(source, format)
    if not source:
        raise SpecError("source is empty", fix="give a file, a folder or 'python'")
    if len(source) == 1:
        return _list_one(source[0], format)
    listing = Listing()
    for one, label in zip(source, _labels(source)):
        prefix = f"{label}/"
        part = _list_one(one, format)
        listing.files += [replace(file, name=prefix + file.name) for file in part.files]
        listing.broken += [(prefix + name, reason) for name, reason in part.broken]
        listing.skipped.update(part.skipped)
    return listing


def _labels(sources: Sequence[str]) -> list[str]:
    """The prefix of the names of each of several sources' files: the source's own name, numbered when not unique."""
    names = [_label(source) for source in sources]
    taken: set[str] = set()
    labels = []
    for name in names:
        label = name
        for number in itertools.count(2):
            if label not in taken and (label == name or label not in names):
                break
            label = f"{name}-{number}"
        taken.add(label)
        labels.append(label)
    return labels


def _label(source: str) -> str:
    source = fixed(source) or "."
    if is_remote(source):
        return source.removeprefix("hf:").rstrip("/").rsplit("/", 1)[-1].replace(":", "-")
    return _printable(Path(source).expanduser().resolve().name) or "root"


def _list_one(source: str, format: str = "") -> Listing:
    if source == PYTHON:
        listing = _python_library()
        where = f"the library of this Python ({sysconfig.get_paths()['stdlib']})"
    elif is_remote(source):
        listing = _remote(source, format)
        where = source
    else:
        root = Path(source).expanduser()
        paths = [root] if root.exists() else _matching(str(root))
        if not paths:
            raise SpecError(f"source {source}: there is no such file or folder", fix="check the path, or use 'python'")
        if paths == [root] and not root.is_dir():
            input_file(root, "source")
        listing = Listing(forced=format)
        if paths == [root]:
            _walk(root, into=listing)
        else:
            _walk_all(paths, Path(fixed(str(root)) or "."), listing)
        listing = _set_apart(listing)
        where = str(source)
    listing.files.sort(key=lambda file: file.name)
    listing.broken.sort()
    if not listing.files:
        endings = ", ".join(f"{count} {ending}" for ending, count in listing.skipped.most_common(5))
        refused = ", ".join(f"{name}: {reason}" for name, reason in listing.broken[:3])
        raise SpecError(
            f"{where} has no file that hone can read (skipped: {endings or 'nothing'}; refused: {refused or 'nothing'})",
            fix=f"give files ending in {READABLE} or source code, or set format to that of all files",
        )
    return listing


def _matching(pattern: str) -> list[Path]:
    """The paths that match a pattern, without those inside a folder that also matches."""
    found: dict[Path, None] = {}
    for path in map(Path, sorted(glob.glob(pattern, recursive=True))):
        if found.keys().isdisjoint(path.parents):
            found[path] = None
    return list(found)


def _walk_all(paths: Sequence[Path], base: Path, listing: Listing) -> None:
    """Adds the files at or below each of `paths`, named relative to `base`."""
    for path in paths:
        _walk(path, into=listing, prefix=path.relative_to(base).as_posix())


def _remote(source: str, format: str) -> Listing:
    """Files of a URL or data set of the hub."""
    listing = Listing(forced=format)
    for url, name, size, version in find(source):
        if name.startswith(".") or "/." in name:
            listing.skipped[_HIDDEN] += 1
            continue
        kind = kind_of(name, format)
        if kind:
            listing.files.append(File(Path(name), name, size, *kind, url=url, version=version, forced=format))
        else:
            listing.skipped[ending_of(name)] += 1
    return listing


def _set_apart(listing: Listing) -> Listing:
    """Sets third-party packages aside, and sets the licence of source files from the nearest licence file above them."""
    listing.broken += [(file.name, "vendored") for file in listing.files if _vendored(file)]
    kept = [file for file in listing.files if not _vendored(file)]
    licences = {name.rpartition("/")[0]: text for name, text in sorted(listing.licences.items(), reverse=True)}
    listing.files = [
        replace(file, licence=_nearest(licences, file.name)) if licences and file.format == "code" else file
        for file in kept
    ]
    return listing


def _vendored(file: File) -> bool:
    return file.format == "code" and is_vendored(file.name)


def _nearest(licences: dict[str, str], name: str) -> str:
    """The licence of the nearest folder around `name` that has one."""
    while name:
        name = name.rpartition("/")[0]
        if name in licences:
            return licences[name]
    return ""


def _python_library() -> Listing:
    listing = _walk(Path(sysconfig.get_paths()["stdlib"]), skip=_NO_LIBRARY)
    kept = []
    for file in listing.files:
        base = file.name.rsplit("/", 1)[-1]
        # _sysconfigdata describes this one machine; config-3.x-... holds the build's makefile.
        if base.startswith("_sysconfigdata") or file.name.startswith("config-"):
            continue
        if base.endswith(".py"):
            kept.append(replace(file, format="python", version=""))  # the time of installation is no version
        elif base.endswith(_LIBRARY_TEXTS):
            kept.append(replace(file, version=""))
    listing.files = kept
    return listing


def _walk(root: Path, skip: frozenset[str] = frozenset(), into: Listing | None = None, prefix: str = "") -> Listing:
    """All regular files at or below `root`, symbolic links followed, each folder once, so that a loop of links ends.

    They are added to the listing `into`; names in a folder begin with `prefix`, which is the whole name of a single file.
    """
    listing = Listing() if into is None else into
    if not root.is_dir():
        _add(listing, root, prefix or root.name)
        return listing
    seen: set[tuple[int, int]] = set()
    pending = [(root, f"{prefix}/" if prefix not in ("", ".") else "")]
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
            if entry.name.startswith("."):
                listing.skipped[_HIDDEN] += 1
                continue
            if entry.name in skip:
                continue
            if _is_folder(entry):
                pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
            else:
                _add(listing, Path(entry.path), f"{prefix}{entry.name}")
    return listing


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _add(listing: Listing, path: Path, name: str) -> None:
    """Adds one file to the listing. Only regular files are opened: a pipe would block for ever."""
    name = _printable(name)
    try:
        status = path.stat()
    except OSError as error:
        listing.broken.append((name, _reason(error)))
        return
    kind = kind_of(name, listing.forced)
    if (
        LICENCE_FILES.match(name.rsplit("/", 1)[-1])
        and stat.S_ISREG(status.st_mode)
        and status.st_size < _LICENCE_BYTES
    ):
        with suppress(OSError):  # it is listed below as what it is
            listing.licences[name] = licence_of(path.read_text(encoding="utf8", errors="replace"))
    if not stat.S_ISREG(status.st_mode):
        listing.skipped["(no regular file)"] += 1
    elif not kind:
        listing.skipped[ending_of(name)] += 1
    else:
        version = str(status.st_mtime_ns)
        listing.files.append(File(path, name, status.st_size, *kind, version=version, forced=listing.forced))


def _printable(name: str) -> str:
    """The name with bytes that are not UTF-8 escaped, so that it can be written to JSON."""
    return name.encode("utf8", "surrogateescape").decode("utf8", "replace")


def _reason(error: OSError) -> str:
    return {PermissionError: "no_permission", FileNotFoundError: "dangling_link"}.get(type(error), "unreadable")
