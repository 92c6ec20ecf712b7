"""Store: artifacts on object stores (any that fsspec knows), pushed and pulled atomically.

An object store writes a file atomically, but has no rename and no locks. So `push` writes hone.json last: a
URL with hone.json holds a whole artifact. `begun.json` records an interrupted push and the files that it may have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hone.base.artifact import MANIFEST, Artifact, parse, reserve
from hone.base.durable import NO_SPACE, sha256_once, sync, write_atomic
from hone.base.errors import ArtifactError, DriftError, FitError, HoneError, MachineError, MissingExtra, SpecError
from hone.base.figure import human_bytes
from hone.base.identity import changed_file, drift, present
from hone.base.partial import BEGUN, need_local, partial_of, publish
from hone.base.run import Run

AT_ONCE = 8
"""Concurrent transfers, which mostly wait for the network."""
_HALF = ".hone-tmp"
T = TypeVar("T")


def file_system(url: str, doing: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of a URL. `doing` begins the message of an error: 'reading s3://bucket/x'.

    Raises MissingExtra without fsspec or the package for the URL's scheme, SpecError for an invalid URL.
    """
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        raise MissingExtra.of(doing, "fsspec", "data") from None
    try:
        return url_to_fs(url)
    except ImportError as error:
        home = known_implementations.get(url.partition("://")[0], {}).get("class", "").partition(".")[0]
        fix = f"pip install {home}" if home not in ("", "fsspec") else "install the package it names"
        raise MissingExtra(f"{doing}: {error}", fix=fix) from None
    except ValueError as error:
        raise SpecError(f"{doing}: {error}", fix="give a URL fsspec knows, such as s3://bucket/folder") from None


def unreachable(url: str, error: BaseException) -> MachineError:
    """The error for a URL that does not answer, with the first line of its client's error."""
    said = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return MachineError(
        f"{url} cannot be reached: {said}",
        fix="check address, network and access rights and try again, or copy it to a local folder",
    )


class Store:
    """The objects below a URL or an absolute folder, by name. Every method raises MachineError when the store refuses or does not answer."""

    def __init__(self, url: str) -> None:
        if "://" not in url and not Path(url).expanduser().is_absolute():
            raise SpecError(f"'{url}' is not a URL", fix="write scheme://place/folder, such as s3://bucket/data-text")
        self.url = url.rstrip("/") if "://" in url else f"{Path(url).expanduser()}"
        self._system, root = file_system(self.url, f"using {self.url}")
        self._root = root.rstrip("/")
        protocol = self._system.protocol
        self._renames = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def sizes(self) -> dict[str, int]:
        """Bytes of every object by name; {} without objects."""
        with self._reaching(self.url):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        inside = f"{self._root}/"
        return {
            path.removeprefix(inside): int(row.get("size") or 0)
            for path, row in sorted(found.items())
            if path.startswith(inside) and row.get("type") != "directory" and not path.endswith(_HALF)
        }

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None when it does not exist."""
        with self._reaching(f"{self.url}/{name}"):
            try:
                return self._system.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object."""
        with self._reaching(f"{self.url}/{name}"), self._whole(name) as path:
            self._system.pipe_file(path, content)

    def put(self, file: Path, name: str) -> None:
        """Uploads a file as an object."""
        with self._reaching(f"{self.url}/{name}"), self._whole(name) as path:
            self._system.put_file(str(file), path)

    def get(self, name: str, file: Path) -> None:
        """Downloads an object to a file, atomically. Raises ArtifactError when it does not exist."""
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_name(f".{file.name}-{secrets.token_hex(4)}.tmp")
        try:
            with self._reaching(f"{self.url}/{name}"):
                try:
                    self._system.get_file(self._path(name), str(half))
                except FileNotFoundError:
                    raise ArtifactError(f"{self.url}/{name} is missing", fix="upload it again") from None
            sync(half)
            os.replace(half, file)
        finally:
            half.unlink(missing_ok=True)

    def fetch(self, name: str, file: Path, num_bytes: int, digest: str, fix: str) -> None:
        """`get`, unless `file` has these bytes already. Raises ArtifactError when the object is missing or has another hash."""
        if file.is_file() and file.stat().st_size == num_bytes and sha256_once(file) == digest:
            return
        shown = "" if PurePosixPath(name).name == file.name else f" ({file.name})"
        try:
            self.get(name, file)
        except ArtifactError as error:
            raise ArtifactError(f"{error.what}{shown}", fix=fix) from None
        size = file.stat().st_size
        if size == num_bytes and sha256_once(file) == digest:
            return
        file.unlink()
        short = f" ({size} bytes, not {num_bytes})" if size != num_bytes else ""
        raise ArtifactError(f"{self.url}/{name}{shown} is not the file that was uploaded{short}", fix=fix)

    def remove(self, names: Iterable[str]) -> None:
        """Removes those of the objects that exist."""
        for name in names:
            with self._reaching(f"{self.url}/{name}"):
                try:
                    self._system.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """The path to write object `name` to: on a plain file system a temporary file, renamed when whole."""
        final = self._path(name)
        if not self._renames:
            yield final
            return
        os.makedirs(os.path.dirname(final), exist_ok=True)
        half = f"{final}-{secrets.token_hex(4)}{_HALF}"
        try:
            yield half
            os.replace(half, final)
        finally:
            Path(half).unlink(missing_ok=True)

    @contextmanager
    def _reaching(self, url: str) -> Iterator[None]:
        """Turns errors of the store into one line; a full local disk stays an OSError."""
        try:
            yield
        except HoneError:
            raise
        except PermissionError as error:
            said = str(error).strip().split("\n")[0][:200]
            raise MachineError(f"{url}: not allowed: {said}", fix="check your credentials and their rights") from None
        except NotImplementedError:
            raise MachineError(
                f"{url} can only be read", fix="push to a store that takes files: s3://, gs://"
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            raise unreachable(url, error) from None


def at_once(work: Callable[[T], Any], items: Iterable[T], done: Callable[[T], Any] = lambda item: None) -> None:
    """Does `work` for every item, AT_ONCE at a time, calls `done` after each; stops at the first error."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        begun = {threads.submit(work, item): item for item in items}
        try:
            for future in as_completed(begun):
                future.result()
                done(begun[future])
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def push(folder: Path | str, url: str, run: Run | None = None) -> int:
    """Copies an artifact to a URL (s3://, gs://, ...), hone.json last; resumes a killed push. Returns the number of files sent.

    0 when the URL has it already. Raises DriftError when it has another (unless `run.redo`, which replaces it),
    ArtifactError when `folder` is not an artifact or changed since it was made, or when the URL has other files.
    """
    run, artifact = run or Run(), Artifact.read(folder)
    if artifact.kind == "foreign":
        raise ArtifactError(
            f"{folder} has no {MANIFEST}", fix="push the artifact of a stage; copy other folders with other tools"
        )
    files = present(artifact.folder, artifact.manifest["files"])
    changed = changed_file(artifact.folder, files, artifact.folder / MANIFEST)
    if changed is not None:
        raise ArtifactError(
            f"{artifact.folder / changed} is no longer the file that {MANIFEST} describes",
            fix="put it back, or make the artifact again",
        )
    store = _at(url)
    manifest = (artifact.folder / MANIFEST).read_bytes()
    if len(files) < len(artifact.manifest["files"]):
        manifest = json.dumps({**artifact.manifest, "files": files}, indent=1, ensure_ascii=False).encode()
    ours = {"manifest": hashlib.sha256(manifest).hexdigest(), "files": sorted(files)}
    there, begun = store.read(MANIFEST), _begun(store)
    if there is not None and not run.redo:
        _same(store, there, manifest, artifact, run)
        store.remove([BEGUN])
        return 0
    before = store.sizes()
    resumed = there is None and begun == ours
    if resumed:
        run.say(f"resuming the push to {store.url}")
    else:
        _clear(store, before, there, begun)
        store.write(BEGUN, json.dumps(ours).encode())
        before = {}
    left = [name for name, row in files.items() if before.get(name) != row["bytes"]]
    with run.progress("push", sum(row["bytes"] for row in files.values()), "B") as bar:
        bar.advance(sum(row["bytes"] for name, row in files.items() if name not in set(left)))
        at_once(
            lambda name: store.put(artifact.folder / name, name), left, lambda name: bar.advance(files[name]["bytes"])
        )
    after = store.sizes()
    for name, row in files.items():
        if after.get(name) != row["bytes"]:
            raise MachineError(
                f"{store.url}/{name} has {after.get(name, 0)} bytes after {row['bytes']} were uploaded",
                fix="push again, and check that nobody else writes to this URL",
            )
    store.write(MANIFEST, manifest)
    store.remove([BEGUN])
    return len(left)


def _at(url: str) -> Store:
    """The store of an artifact. Raises SpecError for a path: folders are copied with other tools."""
    if "://" not in url:
        raise SpecError(f"'{url}' is not a URL", fix="write scheme://place/folder, such as s3://bucket/data-text")
    return Store(url)


def _begun(store: Store) -> dict[str, Any] | None:
    """The record of an interrupted push and the files it may have sent; None without one."""
    content = store.read(BEGUN)
    if content is None:
        return None
    try:
        begun = json.loads(content)
        return {"manifest": str(begun["manifest"]), "files": [str(name) for name in begun["files"]]}
    except (ValueError, KeyError, TypeError):
        raise ArtifactError(
            f"{store.url}/{BEGUN} was not written by hone",
            fix="give a URL of the artifact's own, or remove it",
        ) from None


def _same(store: Store, there: bytes, manifest: bytes, artifact: Artifact, run: Run) -> None:
    """Reports that the artifact is there already. Raises DriftError when it is another."""
    other = parse(there, f"{store.url}/{MANIFEST}", "remove it, or give another URL")
    if other["fingerprint"] != artifact.fingerprint:
        raise DriftError(
            f"{store.url} holds another artifact: {drift(other, artifact.manifest)}",
            fix="give another URL, or replace what is there with --redo",
        )
    note = "" if there == manifest else ", made by another run of the same spec (--redo replaces it)"
    run.say(f"{store.url} holds {artifact.kind}-{artifact.name} already{note}")


def _clear(store: Store, before: dict[str, int], there: bytes | None, begun: dict[str, Any] | None) -> None:
    """Removes the files of earlier pushes, hone.json first. Raises ArtifactError when there are files of others."""
    known = set(begun["files"]) if begun else set()
    if there is not None:
        known |= set(parse(there, f"{store.url}/{MANIFEST}", "remove it, or give another URL")["files"])
    foreign = [name for name in before if name not in known and name not in (MANIFEST, BEGUN)]
    if foreign:
        raise ArtifactError(
            f"{store.url} has files that hone did not write: {', '.join(foreign[:3])}",
            fix="give a URL of the artifact's own; hone overwrites nothing it did not make",
        )
    old = [name for name in before if name in known]
    if there is not None or old:
        # Until the last is removed, the record must show whose files these are, and that they are not the new artifact's.
        store.write(BEGUN, json.dumps({"manifest": "", "files": sorted(known)}).encode())
        store.remove([MANIFEST])
        at_once(lambda name: store.remove([name]), old)


def pull(url: str, folder: Path | str, run: Run | None = None) -> Artifact:
    """Copies an artifact from a URL into `folder`, checking every file's hash; resumes a killed pull.

    An existing `folder` with the same fingerprint is reused. Raises DriftError when it has another (unless
    `run.redo`), ArtifactError when it is not an artifact or the URL has no whole one.
    """
    need_local(folder, "hone pull URL FOLDER: a folder of this machine")
    run, out, store = run or Run(), Path(folder), _at(url)
    content = store.read(MANIFEST)
    if content is None and store.read(BEGUN) is not None:
        raise ArtifactError(f"{store.url} is unfinished: its push was interrupted", fix="run the same push again")
    if content is None:
        raise ArtifactError(f"{store.url} has no {MANIFEST}", fix="give the URL that an artifact was pushed to")
    again = f"push it again: hone push FOLDER {store.url} --redo"
    manifest = parse(content, f"{store.url}/{MANIFEST}", again)
    files = _need_files(manifest, store, again)
    opened = reserve(out, manifest, f"pull {hashlib.sha256(content).hexdigest()}", run, {})
    if isinstance(opened, Artifact):
        run.say(f"{out} holds {opened.kind}-{opened.name} already")
        return opened
    lock, _ = opened
    with lock:
        partial = partial_of(out)
        for path in [path for path in partial.rglob("*") if path.is_file() and path.name != BEGUN]:
            if path.relative_to(partial).as_posix() not in files:
                path.unlink()  # incomplete, from a killed pull
        left = sum(row["bytes"] for name, row in files.items() if not (partial / name).exists())
        free = shutil.disk_usage(partial).free
        if left > free:
            raise FitError(
                f"{out} needs {human_bytes(left)} of disk, has {human_bytes(free)}",
                fix="free some, or pull to another disk",
            )

        def fetch(name: str) -> None:
            store.fetch(name, partial / name, files[name]["bytes"], files[name]["sha256"], again)

        with run.progress("pull", sum(row["bytes"] for row in files.values()), "B") as bar:
            at_once(fetch, files, lambda name: bar.advance(files[name]["bytes"]))
        write_atomic(partial / MANIFEST, content)
        publish(out, lock)
    return Artifact.read(out)


def _need_files(manifest: dict[str, Any], store: Store, fix: str) -> dict[str, dict[str, Any]]:
    """The manifest's files. Raises ArtifactError for a name outside of the folder."""
    for name, row in manifest["files"].items():
        parts = PurePosixPath(name).parts
        sound = isinstance(row, dict) and isinstance(row.get("bytes"), int) and isinstance(row.get("sha256"), str)
        if not sound or name in ("", MANIFEST, BEGUN) or "/".join(parts) != name or ".." in parts:
            raise ArtifactError(f"{store.url}/{MANIFEST} is corrupt: its file '{name}'", fix=fix)
    return manifest["files"]
