"""Remote: files of fsspec URLs (s3://, gs://, https:// ...) and of Hugging Face data sets, listed and opened."""

from __future__ import annotations

import importlib
import re
from typing import IO, Any, NamedTuple

from hone.base.errors import HoneError, MissingExtra, SpecError
from hone.base.store import file_system, unreachable

HUB = "hf:"
_CLIENTS = (
    "aiohttp",
    "requests",
    "urllib3",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "botocore",
    "google",
    "azure",
    "huggingface_hub",
)
_PARQUET_BRANCH = "refs/convert/parquet"
_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
"""Names under which file systems give the version of a file, the most reliable first."""
_MAGIC = re.compile(r"[*?[]")


class Found(NamedTuple):
    """A remote file. `version` is its store's version: etag or modification time; '' for none."""

    url: str
    name: str
    size: int
    version: str


class _Entry(NamedTuple):
    path: str
    size: int
    version: str


def is_remote(source: str) -> bool:
    """Whether `source` is a data set of the Hub or a URL."""
    return source.startswith(HUB) or "://" in source


def open_remote(url: str) -> IO[bytes]:
    """The bytes of `url`, seekable. Raises MissingExtra, MachineError."""
    system, path = _system(url)
    try:
        return system.open(path, "rb", block_size=4 << 20)
    except HoneError:
        raise
    except FileNotFoundError:
        raise
    except Exception as error:
        raise unreachable(url, error) from None


def is_lost(error: BaseException) -> bool:
    """Whether `error` means that the connection failed, not that its data are invalid."""
    home = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or home in _CLIENTS


def fixed(source: str) -> str:
    """The folder above the first part of a path or URL that is a pattern; all of it without a pattern."""
    match = _MAGIC.search(source)
    if not match:
        return source
    folder, slash, _ = source[: match.start()].rpartition("/")
    return folder or slash


def find(source: str) -> list[Found]:
    """Every file of `source`: a URL of a file or folder, a pattern, or 'hf:owner/name[:config][:split]'.

    Raises MissingExtra, MachineError, and SpecError when nothing matches.
    """
    if source.startswith(HUB) and not source.startswith("hf://"):
        return _data_set(source)
    system, root = _system(source)
    scheme = source.partition("://")[0]
    base = root.rstrip("/")
    found = _walk(system, root, source)
    if not found and fixed(root) != root:
        found, base = _matching(system, root, source), fixed(root).rstrip("/")
    if not found:
        raise SpecError(f"source {source}: there is no such file or folder", fix="check the address")
    return [
        Found(f"{scheme}://{path}" if "://" not in path else path, _inside(path, base), size, version)
        for path, size, version in found
    ]


def _matching(system: Any, pattern: str, source: str) -> list[_Entry]:
    """All files that match a pattern, and those below folders that match it."""
    try:
        paths = system.glob(pattern)
    except FileNotFoundError:
        return []
    except Exception as error:
        raise unreachable(source, error) from None
    found = {entry.path: entry for path in paths for entry in _walk(system, path, source)}
    return [found[path] for path in sorted(found)]


def _data_set(source: str) -> list[Found]:
    """The Parquet files of a data set on the Hub: those converted by the Hub, else the data set's own files."""
    name, *picked = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(picked) > 2:
        raise SpecError(
            f"source {source} is not the name of a data set", fix="write hf:OWNER/NAME, hf:OWNER/NAME:CONFIG:SPLIT"
        )
    try:
        importlib.import_module("huggingface_hub")
    except ImportError:
        raise MissingExtra.of("reading Hugging Face data sets", "huggingface_hub", "data") from None
    config, split = (*picked, "", "")[:2]
    system, _ = _system("hf://")
    root = f"datasets/{name}@{_PARQUET_BRANCH}"
    found = _walk(system, root, source)
    if not found:
        return _own_files(system, name, config, split, source)
    # config/split/0000.parquet
    rows = [(entry, _inside(entry.path, root).split("/")) for entry in found if entry.path.endswith(".parquet")]
    config = _choose("config", config, sorted({part[0] for _, part in rows}), "default", source)
    rows = [row for row in rows if row[1][0] == config]
    split = _choose("split", split, sorted({part[1] for _, part in rows}), "train", source)
    return [
        Found(f"hf://{path}", "/".join(part), size, version) for (path, size, version), part in rows if part[1] == split
    ]


def _own_files(system: Any, name: str, config: str, split: str, source: str) -> list[Found]:
    """The files of the data set's repository; with a config or split, those whose path contains it."""
    root = f"datasets/{name}"
    found = _walk(system, root, source)
    if not found:
        raise SpecError(f"source {source}: the Hub has no such data set", fix="check owner and name")
    rows = [Found(f"hf://{path}", _inside(path, root), size, version) for path, size, version in found]
    chosen = [row for row in rows if config in row.name and split in row.name]
    if not chosen:
        names = ", ".join(row.name for row in rows[:8])
        raise SpecError(
            f"source {source}: no file of the data set has this config or split in its path",
            fix=f"its files are: {names}",
        )
    return chosen


def _choose(what: str, wanted: str, there: list[str], usual: str, source: str) -> str:
    """The requested config or split; by default the usual or the only one."""
    if not wanted:
        if usual in there or len(there) == 1:
            return usual if usual in there else there[0]
        raise SpecError(
            f"source {source} has several {what}s",
            fix=f"name one, for example {source}:{there[0]} ({', '.join(there)})",
        )
    if wanted not in there:
        raise SpecError(f"source {source}: there is no {what} '{wanted}'", fix=f"choose among: {', '.join(there)}")
    return wanted


def _walk(system: Any, root: str, source: str) -> list[_Entry]:
    """All files at or below `root`, sorted; [] when it is not there."""
    try:
        rows = system.find(root, detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:
        if type(error).__name__ in ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"):
            return []
        raise unreachable(source, error) from None
    return sorted(
        _Entry(path, int(row.get("size") or 0), next((str(row[tag]) for tag in _TAGS if row.get(tag)), ""))
        for path, row in rows.items()
        if row.get("type") != "directory"
    )


def _inside(path: str, root: str) -> str:
    """The part of `path` below `root`, or its own name when it is the root."""
    below = (
        path.removeprefix(root) if path.startswith(root) else path.rsplit(root, 1)[-1]
    )  # paths on the Hub may be escaped
    return below.strip("/") or path.rsplit("/", 1)[-1]


def _system(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL."""
    return file_system(url, f"reading {url}")
