"""Keeping: a pool whose tasks read their inputs from a store and write their results to it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from hone.base.artifact import Draft
from hone.base.durable import sha256
from hone.base.errors import MachineError
from hone.base.run import Run
from hone.base.spec import fingerprint
from hone.base.store import AT_ONCE, Store, at_once
from hone.data.executors.base import Pool, Rescue
from hone.data.executors.task import Function, Kept, Read, Task, fetched
from hone.feed.files.listing import Listing


class Keeping:
    """`pool`, with the results of its tasks stored below `url`. Tasks use the folder `root`, on every machine the same path.

    A task reads the files in its `reads` and all files in `root` that its arguments name. Those that no task wrote are uploaded
    to the store first. Files written on other machines are fetched before their summary is returned.
    """

    def __init__(self, pool: Pool, url: str, root: Path) -> None:
        self._pool, self._url, self._root, self._store = pool, url, root, Store(url)
        self._known: dict[Path, Read] = {}
        self.workers = pool.workers

    @property
    def peak_memory_bytes(self) -> int | None:
        return self._pool.peak_memory_bytes

    def map(self, function: Function, tasks: Sequence[Task], rescue: Rescue | None = None) -> Iterator[dict[str, Any]]:
        given = [task._replace(kept=Kept(self._url, self._reads(task))) for task in tasks]
        arriving: deque[tuple[Task, dict[str, Any], Future]] = deque()

        def arrived() -> dict[str, Any]:
            task, summary, future = arriving.popleft()
            future.result()
            if not task.manifest.exists():
                raise MachineError(
                    f"task {task.name} was done, but {self._url} has no result of this version of the code",
                    fix="install the same version of hone on every machine",
                )
            manifest = json.loads(task.manifest.read_text(encoding="utf8"))
            for name, row in manifest["files"].items():
                self._note(task.folder / name, row["bytes"], row["hash"])
            return summary

        with ThreadPoolExecutor(AT_ONCE) as threads, closing(self._pool.map(function, given, rescue)) as summaries:
            for task, summary in zip(given, summaries):
                arriving.append((task, summary, threads.submit(fetched, function, task)))
                while len(arriving) > AT_ONCE or (arriving and arriving[0][2].done()):
                    yield arrived()
            while arriving:
                yield arrived()

    def _reads(self, task: Task) -> tuple[Read, ...]:
        """The files of the stage that `task` reads, all of them in the store."""
        paths = {path for path in (*task.reads, *_paths(task.arguments)) if path.is_relative_to(self._root)}
        for path in paths - self._known.keys():
            if path.is_file():  # not written by a task: a tokenizer, a scorer's model
                read = self._note(path, path.stat().st_size, sha256(path))
                self._store.put(path, f"files/{read.hash}")
        return tuple(self._known[path] for path in sorted(paths) if path in self._known)

    def _note(self, path: Path, size: int, found: str) -> Read:
        self._known[path] = Read(path, path.relative_to(self._root).as_posix(), size, found)
        return self._known[path]


def keep(pool: Pool, url: str, draft: Draft, listing: Listing, run: Run) -> Pool:
    """`pool`, or with a `url` one that stores its tasks' results below it, separately for each spec and input.

    Raises SpecError, MissingExtra or MachineError at once when that URL cannot be used.
    """
    if not url:
        return pool
    # Names and sizes do not show that a file was edited; files in a store, unlike those on disk, outlive the stage.
    store = Store(f"{url.rstrip('/')}/{fingerprint([draft.fingerprint, listing.seen])}")
    if run.redo:
        at_once(lambda name: store.remove([name]), [name for name in store.sizes() if name.startswith("tasks/")])
    store.write("about.json", json.dumps({"name": draft.target.name, "fingerprint": draft.fingerprint}).encode())
    return Keeping(pool, store.url, draft.folder)


def _paths(value: Any) -> Iterator[Path]:
    """Every path among a task's arguments."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _paths(item)
