"""A task of the data stage: its arguments, the folder of its files, the manifest that marks it as done, and a copy of both on an object store.

On a store, so that workers need no shared disk and a lost machine can be replaced, `files/<hash>` are contents and `tasks/<name>-<key>` manifests,
written after the files they list. The same name always has the same content, so it does not matter which worker writes it, how often, or when that
worker is killed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.durable import sha256, sync, write_atomic
from hone.base.errors import ArtifactError
from hone.base.spec import Spec, fingerprint
from hone.base.store import Store, at_once

DONE = ".done"
_ROOMS = ("data", "feed", "readers", "text")
_KINDS = ("*.py", "*.json", "*.bin")
Function = Callable[..., dict[str, Any]]
"""`function(folder, **arguments)` writes its files into the empty `folder` and returns a JSON-serializable summary.

It is defined at the top level of a module, so that another process can import it; its files depend on its arguments alone.
"""


class Read(NamedTuple):
    """A file of the stage that a task reads: its path, its `name` inside the stage's folder, its size and SHA-256."""

    path: Path
    name: str
    bytes: int
    hash: str


class Kept(NamedTuple):
    """The store of one task: its URL, and the files that the task reads, which are in the store before it begins."""

    url: str
    reads: tuple[Read, ...]

    def name(self, task: str, key: str) -> str:
        """The name of task `task`'s manifest; `key` identifies the task, including the contents of what it reads."""
        return f"tasks/{task}-{fingerprint([key, [[read.name, read.hash] for read in self.reads]])}"

    def find(self, name: str) -> dict[str, Any] | None:
        """The manifest in object `name`; None when there is none: the task is not done."""
        content = _store(self.url).read(name)
        if content is None:
            return None
        try:
            manifest = json.loads(content)
            return {**manifest, "files": dict(manifest["files"]), "summary": manifest["summary"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{self.url}/{name} is corrupt: {type(error).__name__} {error}", fix="remove it to do this task again"
            ) from None

    def put(self, name: str, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Uploads the files in `folder` that `manifest` lists, then the manifest as object `name`."""
        files = manifest["files"]
        at_once(lambda file: _store(self.url).put(folder / file, f"files/{files[file]['hash']}"), files)
        _store(self.url).write(name, json.dumps(manifest, sort_keys=True).encode())

    def fetch(self, name: str, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Downloads the files that manifest `name` lists into `folder`. Raises ArtifactError for one with other content."""
        fix = f"remove {self.url}/{name} to do this task again"
        at_once(lambda file: self._bring(folder / file, files[file]["bytes"], files[file]["hash"], fix), files)

    def fetch_reads(self) -> None:
        """Downloads missing files that the task reads."""
        fix = "run it again with another --executor.store"
        at_once(lambda read: self._bring(read.path, read.bytes, read.hash, fix), self.reads)

    def _bring(self, path: Path, size: int, digest: str, fix: str) -> None:
        _store(self.url).fetch(f"files/{digest}", path, size, digest, fix)


@functools.lru_cache(maxsize=4)
def _store(url: str) -> Store:
    """The store at `url`, cached: opening a file system's client takes longer than a small task."""
    return Store(url)


class Task(NamedTuple):
    """One unit of work. Its files appear in `folder` under the names that the function gives them, then `<name>.done`.

    `arguments` are those of the function after the folder, by name. `identity` (JSON) is what the result depends on:
    parameters, and names and sizes of the inputs. `reads` are the files of the stage that it reads, apart from those among
    its arguments. `kept`: the store of its inputs and results.
    """

    name: str
    folder: Path
    arguments: Mapping[str, Any]
    identity: Any
    reads: tuple[Path, ...] = ()
    kept: Kept | None = None

    @classmethod
    def of(
        cls, name: str, folder: Path, arguments: Mapping[str, Any], *more: Any, reads: tuple[Path, ...] = ()
    ) -> Task:
        """A task whose result depends on its arguments (`identity_of`) and on `more`, JSON such as hashes of files that they name."""
        return cls(name, folder, arguments, [identity_of(arguments), *more], reads)

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.name}{DONE}"

    def given(self, **changed: Any) -> Task:
        """The same task with other values of some arguments."""
        return self._replace(arguments={**self.arguments, **changed})

    def key(self, function: Function) -> str:
        """Hash of the code, the function's name and `identity`: a result with another key is not reused."""
        return fingerprint([code_version(), f"{function.__module__}:{function.__qualname__}", self.identity])


def digest(*arrays: np.ndarray) -> str:
    """Hash of the arrays' bytes."""
    together = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.blake2b(together, digest_size=8).hexdigest()


def identity_of(value: Any) -> Any:
    """What identifies an argument, as JSON: what its own `identity()` says, a spec's fields, a hash of an array, a file's name and size.

    A folder is told by nothing, since its path differs between machines: what is read in it is among a task's `more`.
    """
    if isinstance(value, Spec) or hasattr(value, "identity"):
        return value.identity()
    if isinstance(value, np.ndarray):
        return digest(value)
    if isinstance(value, Path):
        return [value.name, value.stat().st_size] if value.is_file() else None
    if isinstance(value, Mapping):
        return {name: identity_of(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [identity_of(item) for item in value]
    return value


def finished(function: Function, task: Task) -> dict[str, Any] | None:
    """The summary of a task that is already done, else None.

    Raises ArtifactError when a file that its manifest lists is missing, shorter or changed.
    """
    if not task.manifest.exists():
        return fetched(function, task)
    where = f"{task.manifest}"
    try:
        manifest = json.loads(task.manifest.read_text(encoding="utf8"))
        key, files, summary = manifest["key"], dict(manifest["files"]), manifest["summary"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(f"{where} is corrupt: {type(error).__name__} {error}", task) from None
    kept = task.kept and task.kept.name(task.name, task.key(function))
    if key != task.key(function) or (kept and manifest.get("kept", kept) != kept):
        task.manifest.unlink()  # written by other code or for other input
        return fetched(function, task)
    for name, row in files.items():
        path = task.folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != row["bytes"]:
            raise _damaged(f"{path} has {max(size, 0)} bytes, its manifest lists {row['bytes']}", task)
        if sha256(path) != row["hash"]:
            raise _damaged(f"{path} is not the file that its manifest describes", task)
    if kept and task.kept.find(kept) is None:  # done before the store was configured, or killed before the upload
        task.kept.put(kept, task.folder, manifest)
    return summary


def fetched(function: Function, task: Task) -> dict[str, Any] | None:
    """The summary of a task that was done elsewhere, after its files are downloaded; None when they are here, or not in the store.

    Raises ArtifactError when an object that its manifest lists is missing or changed.
    """
    if task.kept is None or task.manifest.exists():
        return None
    name = task.kept.name(task.name, task.key(function))
    manifest = task.kept.find(name)
    if manifest is None:
        return None
    task.folder.mkdir(parents=True, exist_ok=True)
    task.kept.fetch(name, task.folder, manifest["files"])
    write_atomic(task.manifest, json.dumps(manifest, sort_keys=True).encode())
    return manifest["summary"]


def perform(function: Function, task: Task) -> dict[str, Any]:
    """Runs the task unless it is done: writes its files into a folder of their own, syncs and renames them, the manifest last; then uploads."""
    before = finished(function, task)
    if before is not None:
        return before
    if task.kept is not None:
        task.kept.fetch_reads()
    own = task.folder / f".{task.name}-{os.getpid()}-{secrets.token_hex(4)}"
    own.mkdir(parents=True)
    try:
        summary = function(own, **task.arguments)
        files = {}
        for path in sorted(own.iterdir()):
            sync(path)
            files[path.name] = {"bytes": path.stat().st_size, "hash": sha256(path)}
            os.replace(path, task.folder / path.name)
        sync(task.folder)
        manifest = {"key": task.key(function), "rows": summary.get("rows"), "files": files, "summary": summary}
        if task.kept is not None:
            manifest["kept"] = task.kept.name(task.name, manifest["key"])
        write_atomic(task.manifest, json.dumps(manifest, sort_keys=True).encode())
        if task.kept is not None:
            task.kept.put(manifest["kept"], task.folder, manifest)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return summary


def need_known(folder: Path, tasks: Sequence[Task]) -> None:
    """Raises ArtifactError for a file in `folder` that none of the finished `tasks` wrote; removes what killed workers left."""
    known = set()
    for task in tasks:
        if task.manifest.exists():
            known |= {task.manifest.name, *json.loads(task.manifest.read_text(encoding="utf8"))["files"]}
    left = {f"{task.name}." for task in tasks}
    for path in sorted(folder.iterdir()):
        if path.name in known:
            continue
        if path.name.startswith(".") or path.name.endswith(".tmp"):  # left by a killed worker
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        elif not any(path.name.startswith(name) for name in left):  # its task was killed before its manifest
            raise ArtifactError(
                f"{path} was written by no task of this stage", fix=f"move it away, or delete {folder} to start again"
            )


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """{name: bytes and hash} of every file in `folder` that a finished task wrote, read from the manifests."""
    files: dict[str, dict[str, Any]] = {}
    for manifest in folder.glob(f"*{DONE}"):
        with suppress(ValueError, KeyError):  # a corrupt manifest is an error when its task is requested
            files |= json.loads(manifest.read_text(encoding="utf8"))["files"]
    return files


def contents(files: Sequence[Path]) -> list[list[Any]]:
    """[name, bytes, hash] of each file, from its task's manifest where there is one, else by reading it."""
    known: dict[str, dict[str, Any]] = {}
    for folder in {file.parent for file in files}:
        known |= {f"{folder / name}": row for name, row in written(folder).items()}
    rows = []
    for file in files:
        size, row = file.stat().st_size, known.get(f"{file}")
        hashed = row["hash"] if row and row["bytes"] == size else sha256(file)
        rows.append([file.name, size, hashed])
    return rows


def code_version() -> str:
    """Hash of the files of the rooms whose code tasks run, tables and models beside it too: results of others are not reused."""
    return _code_version(Path(__file__).parent.parent.parent)


@functools.cache
def _code_version(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for room in _ROOMS:
        for path in sorted(path for kind in _KINDS for path in (package / room).rglob(kind)):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _damaged(what: str, task: Task) -> ArtifactError:
    return ArtifactError(what, fix=f"delete {task.manifest} to do this task again")
