"""Artifacts: a folder others can use as it is, plus `hone.json`, written last, that says how it came about.

Life of one: `start` makes `<folder>.partial` (or returns the finished artifact, or resumes a partial one), the stage
writes into `Draft.folder`, `Draft.commit` hashes and syncs every file, writes hone.json and renames. So a folder with
hone.json is whole. Two subfolders of a draft are special: `state/` (what a killed stage resumes from) is removed at
commit, and `log/` (timings, TensorBoard) is kept but is no content: it may differ between two runs of the same spec.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from hone.base.content import changed_file, foreign_fingerprint
from hone.base.durable import sha256, sync, write_atomic
from hone.base.errors import ArtifactError, DriftError
from hone.base.figure import Estimate, Figure, human_bytes
from hone.base.partial import BEGUN, PULL, PUSH, STATE, need_local, partial_of, publish, resume, sweep, take
from hone.base.provenance import provenance
from hone.base.run import Run
from hone.base.spec import Spec, fingerprint

MANIFEST = "hone.json"
LOG = "log"
FORMAT = 1
_FIELDS = {"kind": str, "name": str, "fingerprint": str, "spec": dict, "figures": list, "files": dict}
_FIELDS |= {"parents": list, "techniques": list}


class _Window(Protocol):
    """What `Draft.record_window` needs of a finished `measure.Window` (a room above this one)."""

    @property
    def start_memory_bytes(self) -> int: ...

    def figures(self) -> list[Figure]: ...


class Artifact:
    """A finished folder, or a foreign one (a Hugging Face folder without hone.json) adopted as it is."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def read(cls, folder: Path | str) -> Artifact:
        """The artifact in `folder`; a folder without hone.json is adopted, its files its identity.

        Raises ArtifactError when the folder is missing, unfinished (`.partial`) or its hone.json is broken, SpecError for a URL.
        """
        need_local(folder, PULL)
        folder = Path(folder)
        if not folder.is_dir():
            if partial_of(folder).is_dir():
                raise ArtifactError(
                    f"{folder} is unfinished: its stage was interrupted",
                    fix="run the same command again, it resumes where it stopped",
                )
            raise ArtifactError(f"no folder {folder}", fix=f"check the path; {_nearest(folder)}")
        path = folder / MANIFEST
        if not path.exists():
            return cls(
                folder,
                {
                    "kind": "foreign",
                    "name": folder.name,
                    "fingerprint": foreign_fingerprint(folder),
                    "spec": {},
                    "figures": [],
                    "files": {},
                    "parents": [],
                    "techniques": [],
                },
            )
        return cls(folder, parse(path.read_bytes(), str(path), fix="delete the folder and run its stage again"))

    @property
    def kind(self) -> str:
        """The stage that made it: data, train, compress, eval, serve; 'foreign' when none did."""
        return self.manifest["kind"]

    @property
    def name(self) -> str:
        return self.manifest["name"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def techniques(self) -> list[dict[str, Any]]:
        """What was done to it, in order, its parents' techniques first."""
        return self.manifest["techniques"]

    @property
    def figures(self) -> dict[str, Figure]:
        return {row["name"]: Figure.model_validate(row) for row in self.manifest["figures"]}

    @property
    def content(self) -> str:
        """Digest of every content file: two runs of one spec must agree on it, however often they were killed."""
        return fingerprint(
            {name: row["sha256"] for name, row in self.manifest["files"].items() if not name.startswith(f"{LOG}/")}
        )

    def need(self, *files: str) -> None:
        """Raises ArtifactError unless every one of `files` is in the folder."""
        for name in files:
            if not (self.folder / name).exists():
                raise ArtifactError(
                    f"{self.folder} has no {name}", fix="point at a folder that a hone stage or transformers wrote"
                )

    @property
    def changed(self) -> str | None:
        """Name of the first content file that is no longer what hone.json says; None when all are (`changed_file`)."""
        content = {name: row for name, row in self.manifest["files"].items() if not name.startswith(f"{LOG}/")}
        return changed_file(self.folder, content, self.folder / MANIFEST) if content else None

    def need_unchanged(self) -> None:
        """Raises ArtifactError when a content file changed since the artifact was made: its fingerprint would lie."""
        name = self.changed
        if name is not None:
            raise ArtifactError(
                f"{self.folder / name} is no longer the file that {MANIFEST} describes",
                fix=f"put it back, make all of it again with --redo={self.folder.name}, or delete {MANIFEST} to use it as it is",
            )

    def verify(self) -> None:
        """Re-hashes every file. Raises ArtifactError on the first that is missing or differs."""
        for name, row in self.manifest["files"].items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size != row["bytes"] or sha256(path) != row["sha256"]:
                raise ArtifactError(
                    f"{path} is not the file that {MANIFEST} describes", fix="delete the folder and run its stage again"
                )


def parse(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """The manifest in the hone.json that lies at `where`. Raises ArtifactError, with `fix`, when it is broken."""
    try:
        manifest = json.loads(content)
        known = manifest["format"] == FORMAT
        for name, kind in _FIELDS.items() if known else ():
            if not isinstance(manifest[name], kind):
                raise TypeError(f"{name} is no {kind.__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where} is corrupt: {type(error).__name__} {error}", fix=fix) from None
    if not known:
        raise ArtifactError(
            f"{where} has format {manifest['format']}, this hone reads {FORMAT}",
            fix="use the hone version that wrote it",
        )
    return manifest


class Draft:
    """An artifact in the making. `resumed` is true when an earlier run of the same spec was interrupted."""

    def __init__(
        self, target: Path, identity: dict[str, Any], lock: Any, *, resumed: bool, parents: list[Artifact]
    ) -> None:
        self.target = target
        self.folder = partial_of(target)
        self.resumed = resumed
        self._identity = identity
        self._lock = lock
        self._parents = parents
        self._figures: dict[str, Figure] = {}
        self._estimates: dict[str, Estimate] = {}
        self._techniques = [row for parent in parents[:1] for row in parent.techniques]
        self._command: str | None = None
        self._started = time.monotonic()
        self.state.mkdir(exist_ok=True)
        (self.folder / LOG).mkdir(exist_ok=True)

    @property
    def fingerprint(self) -> str:
        return self._identity["fingerprint"]

    @property
    def state(self) -> Path:
        """What a killed stage resumes from; gone at commit."""
        return self.folder / STATE

    @property
    def log(self) -> Path:
        """Kept, but no content: timings, TensorBoard events."""
        return self.folder / LOG

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on this artifact by this process and, as far as `keep_time` was called, by killed ones before it."""
        try:
            before = float((self.state / "elapsed_s").read_text())
        except (OSError, ValueError):
            before = 0.0
        return before + time.monotonic() - self._started

    def keep_time(self) -> None:
        """Notes the seconds spent so far; call it at every durable step."""
        spent = self.elapsed_s
        write_atomic(self.state / "elapsed_s", repr(spent).encode())
        self._started = time.monotonic()

    def predict(self, estimates: dict[str, Estimate]) -> None:
        """Says before the work what its figures should come to; joined to the figure of the same name."""
        self._estimates.update(estimates)

    def record(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """Adds figure `name` (see `Figure` for `more`). NaN and infinity are no figures: it is absent, and its note says so."""
        if value is not None and not math.isfinite(value):
            note = more.get("note")
            value, more["note"] = None, f"{value}, which is no figure" + (f"; {note}" if note else "")
        self._figures[name] = Figure(name=name, value=value, unit=unit, **more)

    def record_window(self, window: _Window) -> None:
        """Adds time, peak memory and energy as a `measure.Window` saw them; time includes killed runs.

        What was in use when the window opened joins the estimate of what the work adds: the estimate of the peak.
        """
        growth, before = self._estimates.get("memory_growth_bytes"), window.start_memory_bytes
        if growth is not None:
            formula = f"in use before {human_bytes(before)} + {growth.formula}"
            peak = growth.model_copy(update={"value": before + growth.value, "formula": formula})
            self._estimates.setdefault("peak_memory_bytes", peak)
        for figure in window.figures():
            if figure.name == "time_s":
                figure = figure.model_copy(
                    update={"value": self.elapsed_s, "note": "with interrupted runs" if self.resumed else ""}
                )
            self._figures[figure.name] = figure

    def did(self, technique: dict[str, Any]) -> None:
        """Appends one applied technique (its spec with `kind` and `slot`) to what was done to the artifact."""
        self._techniques.append(technique)

    def command(self, text: str) -> None:
        """The exact command that makes this artifact again."""
        self._command = text

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the folder free for another try, whether the work was committed or failed."""
        self._lock.close()

    def commit(self) -> Artifact:
        """Hashes and syncs the files, writes hone.json, renames the folder. Returns the finished artifact."""
        files = {}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            # A full disk or a kill can leave an earlier attempt at the manifest behind.
            if name in (BEGUN, MANIFEST, f"{MANIFEST}.tmp") or name.startswith(f"{STATE}/"):
                continue
            sync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        size = sum(row["bytes"] for row in files.values())
        self.record("disk_bytes", size, "B", note="the finished folder")
        figures = [
            figure.model_copy(update={"estimate": self._estimates.get(name)}) for name, figure in self._figures.items()
        ]
        missing = [name for name in self._estimates if name not in self._figures]
        assert not missing, f"predicted but never measured: {missing}"
        manifest = {
            "format": FORMAT,
            **self._identity,
            "techniques": self._techniques,
            "figures": [figure.model_dump(mode="json") for figure in figures],
            "provenance": {**provenance(), "command": self._command or shlex.join(sys.argv)},
            "files": files,
        }
        write_atomic(self.folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
        publish(self.target, self._lock)
        return Artifact(self.target, manifest)


def finished(
    out: Path,
    *,
    kind: str,
    spec: Spec,
    parents: dict[str, Artifact],
    files: dict[str, Path],
    run: Run,
) -> Artifact | None:
    """The artifact in `out` when it is whole and made from the same; None when it is to be made. Raises as `start` does."""
    need_local(out, PUSH)
    for parent in parents.values():
        parent.need_unchanged()
    return _finished(out, _identity(out, kind, spec, parents, files, run), run)


def start(
    out: Path | str,
    *,
    kind: str,
    spec: Spec,
    parents: dict[str, Artifact] | None = None,
    files: dict[str, Path] | None = None,
    run: Run | None = None,
) -> Artifact | Draft:
    """Opens folder `out` for a stage of `kind`: the finished Artifact when it is already there, else a Draft.

    `parents` maps a role ('data', 'model') to the artifact that fills it, `files` a field to a file it names; their
    content is part of the identity. Raises DriftError when `out` was made from another spec or other inputs (unless
    `run.redo`), ArtifactError when another process is making it right now, or a file of it or of a parent was changed.
    """
    need_local(out, PUSH)
    out, run = Path(out), run or Run()
    for parent in (parents or {}).values():
        parent.need_unchanged()
    identity = _identity(out, kind, spec, parents or {}, files or {}, run)
    opened = reserve(out, identity, identity["fingerprint"], run, parents or {})
    if isinstance(opened, Artifact):
        return opened
    lock, resumed = opened
    return Draft(out, identity, lock, resumed=resumed, parents=list((parents or {}).values()))


def reserve(
    out: Path, identity: dict[str, Any], token: str, run: Run, parents: dict[str, Artifact]
) -> Artifact | tuple[Any, bool]:
    """The finished artifact of this identity in `out`; else (lock of its partial folder, whether it was begun for `token`).

    Raises as `start` does.
    """
    finished = _finished(out, identity, run)
    if finished is not None:
        return finished
    _stand_outside(out, parents)
    lock = take(out)
    if run.redo and out.exists():
        shutil.rmtree(out)  # under the lock: two that make it again do not collide
    finished = _finished(out, identity, run)  # the other process may have finished between the look and the lock
    if finished is not None:
        lock.close()
        shutil.rmtree(partial_of(out), ignore_errors=True)
        return finished
    return lock, resume(out, lock, token, run)


def _identity(
    out: Path, kind: str, spec: Spec, parents: dict[str, Artifact], files: dict[str, Path], run: Run
) -> dict[str, Any]:
    """What an artifact is made from, and the fingerprint of that."""
    roles = [
        {"role": role, "name": f"{parent.kind}-{parent.name}", "fingerprint": parent.fingerprint}
        for role, parent in parents.items()
    ]
    made_from: dict[str, Any] = {"kind": kind, "spec": spec.model_dump(mode="json"), "parents": _by_role(roles)}
    if files:
        made_from["files"] = {name: sha256(path)[:16] for name, path in files.items()}
    return {
        "kind": kind,
        "name": out.name.removeprefix(f"{kind}-"),
        "spec": made_from["spec"],
        "parents": roles,
        "input_files": made_from.get("files", {}),
        "fingerprint": fingerprint(made_from),
        "machine": run.machine,
    }


def _by_role(roles: list[dict[str, str]]) -> dict[str, str]:
    return {row["role"]: row["fingerprint"] for row in roles}


def _stand_outside(out: Path, parents: dict[str, Artifact]) -> None:
    """Raises ArtifactError when `out` lies inside an artifact or an input: writing there would change what that is."""
    taken = {parent.folder.resolve() for parent in parents.values()}
    for folder in out.resolve().parents:
        if folder in taken or (folder / MANIFEST).exists():
            raise ArtifactError(
                f"{out} lies inside {folder}, which is an input or an artifact", fix="give an output folder beside it"
            )


def _finished(out: Path, identity: dict[str, Any], run: Run) -> Artifact | None:
    """The artifact in `out` if it is whole and of this identity; None when it is to be made; raises on drift."""
    if not out.exists():
        return None
    if not (out / MANIFEST).exists():
        raise ArtifactError(
            f"{out} exists and is no artifact of hone",
            fix="give another output folder; hone overwrites nothing it did not make",
        )
    there = Artifact.read(out)
    if run.redo:
        return None
    if there.fingerprint == identity["fingerprint"]:
        sweep(out)  # its maker may have been killed right after the rename
        there.need_unchanged()
        return there
    raise DriftError(
        f"{out} was made from another spec: {drift(there.manifest, identity)}",
        fix=f"keep it and give the new one another name, or make it again with --redo={out.name}",
    )


def drift(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first field in which what two manifests' artifacts were made from differs."""
    return difference(
        *(
            {
                "kind": one["kind"],
                "spec": one["spec"],
                "parents": _by_role(one["parents"]),
                "files": one.get("input_files", {}),
            }
            for one in (before, now)
        )
    )


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


def _nearest(folder: Path) -> str:
    import difflib

    beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, beside, n=1)
    return (
        f"did you mean {folder.parent / near[0]}?"
        if near
        else f"{folder.parent} holds: {', '.join(sorted(beside)[:8]) or 'no folders'}"
    )
