"""Store: a copy of tasks' results on an object store, so that workers need no shared disk and a lost machine can be replaced.

`files/<hash>` are contents, `tasks/<name>-<key>` manifests, written after the files they list. The same name always has the
same content, so it does not matter which worker writes it, how often, or when that worker is killed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hone.base.errors import ArtifactError
from hone.base.spec import fingerprint
from hone.base.store import Store, at_once


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
