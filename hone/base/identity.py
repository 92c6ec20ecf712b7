"""Identity: the inputs of an artifact and its fingerprint, the difference of two, and whether its files are unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hone.base.durable import sha256
from hone.base.errors import DriftError, SpecError
from hone.base.spec import Spec, fingerprint

NO_CONTENT = ("log/", "training_state/")
"""Folders of an artifact that are kept but not content: they may differ between two runs of one spec, and may be deleted."""


class Parent(Protocol):
    """The attributes of a parent artifact that identities use."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def identify(
    out: Path, kind: str, spec: Spec, parents: Mapping[str, Parent], files: Mapping[str, Path], machine: dict[str, Any]
) -> dict[str, Any]:
    """The part of hone.json that is known before the work: the inputs of `out`, its fingerprint, and `machine`.

    The whole spec is stored; its circumstances are not part of the fingerprint.
    """
    row: dict[str, Any] = {
        "kind": kind,
        "name": out.name.removeprefix(f"{kind}-"),
        "spec": spec.model_dump(mode="json"),
        "parents": [
            {"role": role, "name": f"{parent.kind}-{parent.name}", "fingerprint": parent.fingerprint}
            for role, parent in parents.items()
        ],
        "input_files": {name: sha256(path)[:16] for name, path in files.items()},
    }
    return {**row, "fingerprint": fingerprint(_made_from(row, spec.identity())), "machine": machine}


def drift(before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None = None) -> str:
    """The first input in which two manifests differ. `kind`: the spec class of `now`."""
    specs = [_identity_of(one, kind) or one["spec"] for one in (before, now)]
    return difference(*(_made_from(one, spec) for one, spec in zip((before, now), specs, strict=True)))


def read_both(
    before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None
) -> tuple[Spec, Spec] | tuple[None, None]:
    """The specs of two manifests that differ in nothing else, as `kind`; (None, None) when they do or cannot be read."""
    try:
        specs = None if kind is None else [kind.read(one["spec"]) for one in (before, now)]
    except SpecError:
        return None, None
    if specs is None or difference(*(_made_from(one, {}) for one in (before, now))):
        return None, None
    return specs[0], specs[1]


def drifted(out: Path, before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None) -> DriftError:
    """The error for the finished artifact `out`, whose manifest is `before`, when `now` is to be made there."""
    finished, spec = read_both(before, now, kind)
    on = spec.after(finished, out) if finished is not None and spec is not None else ""
    return DriftError(
        f"{out} was made from another spec: {drift(before, now, kind)}",
        fix=f"{on}keep it and give the new one another name, or make it again with --redo={out.name}",
    )


def _identity_of(manifest: dict[str, Any], kind: type[Spec] | None) -> dict[str, Any] | None:
    """The identity of a manifest's spec, read as `kind`; None when it cannot be read."""
    try:
        return None if kind is None else kind.read(manifest["spec"]).identity()
    except SpecError:
        return None


def _made_from(manifest: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """The content of a fingerprint: kind, `spec`, the parents' fingerprints by role, hashes of files if there are any."""
    made_from = {"kind": manifest["kind"], "spec": spec}
    made_from["parents"] = {row["role"]: row["fingerprint"] for row in manifest["parents"]}
    files = manifest.get("input_files", {})
    return {**made_from, "files": files} if files else made_from


def difference(before: Any, now: Any, path: str = "") -> str:
    """The first field in which two specs differ: 'spec.steps was 10, is 20'; '' when they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            found = difference(before.get(key, "absent"), now.get(key, "absent"), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return ""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for position, (one, other) in enumerate(zip(before, now, strict=True)):
            found = difference(one, other, f"{path}.{position}")
            if found:
                return found
        return ""
    return "" if before == now else f"{path} was {before!r}, is {now!r}"


def content_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The rows of a manifest's content files, by name."""
    return {name: row for name, row in manifest["files"].items() if not name.startswith(NO_CONTENT)}


def present(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    """`files` of a manifest without those that may be deleted and were."""
    return {name: row for name, row in files.items() if not name.startswith(NO_CONTENT) or (folder / name).exists()}


def changed_file(folder: Path, files: dict[str, Any], manifest: Path) -> str | None:
    """The first of `files` (name to its recorded `bytes` and `sha256`) that is missing or differs from `manifest`.

    Compares sizes and times: a manifest is written after its files, so only files that are newer are read, as
    after an edit or a plain copy of the folder. When their content is unchanged, the manifest's time is set after theirs, so
    that they are not read again. An edit that restores size and time is not found; `Artifact.verify` reads everything.
    """
    made = manifest.stat()
    newest = made.st_mtime_ns
    for name, row in files.items():
        path = folder / name
        try:
            found = path.stat()
        except OSError:
            return name
        if not isinstance(row, dict) or found.st_size != row.get("bytes"):
            return name
        if found.st_mtime_ns > made.st_mtime_ns:
            if sha256(path) != row.get("sha256"):
                return name
            newest = max(newest, found.st_mtime_ns)
    if newest > made.st_mtime_ns:
        with suppress(OSError):  # a read-only folder
            os.utime(manifest, ns=(made.st_atime_ns, newest))
    return None


def foreign_fingerprint(folder: Path) -> str:
    """Identity of a folder not made by hone: names and sizes of all files, content of small ones, both ends of large ones."""
    rows = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
            if size > 2 << 20:
                file.seek(-(1 << 20), os.SEEK_END)
                digest.update(file.read())
            elif size > 1 << 20:
                digest.update(file.read())
        rows[path.relative_to(folder).as_posix()] = [size, digest.hexdigest()]
    return fingerprint(rows)
