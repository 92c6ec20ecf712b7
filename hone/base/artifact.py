"""Artifacts: a folder in a common format plus `hone.json`, written last, which records how it was made.

`start` makes `<folder>.partial` (or returns the finished artifact, or resumes a partial one), the stage
writes into `Draft.folder`, `Draft.commit` hashes and syncs every file, writes hone.json and renames the folder. So a
folder with hone.json is whole. Two subfolders of a draft are special: `state/` (from which a killed stage resumes) is removed at
commit, and `log/` (timings, TensorBoard) is kept but not content: it may differ between two runs of the same spec.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hone.base.durable import sha256, sync, whole_number, write_atomic
from hone.base.errors import ArtifactError, did_you_mean
from hone.base.figure import Estimate, Figure, human_bytes, read_figures
from hone.base.identity import (
    changed_file,
    content_of,
    drifted,
    foreign_fingerprint,
    identify,
    present,
)
from hone.base.lazy import resolve
from hone.base.partial import BEGUN, PULL, PUSH, STATE, need_local, partial_of, publish, release, resume, sweep, take
from hone.base.provenance import provenance
from hone.base.run import Run
from hone.base.spec import Spec, fingerprint

MANIFEST = "hone.json"
LOG = "log"
FORMAT = 1
HUB_FOLDER, NO_FOLDER = "hone.model.folder:fetched", "hone.model.folder:no_folder"
"""The functions that fetch hf:OWNER/NAME and that explain why a path is not a folder; imported on use."""
_FIELDS = {"kind": str, "name": str, "fingerprint": str, "spec": dict, "figures": list, "files": dict}
_FIELDS |= {"parents": list, "techniques": list}


class _Window(Protocol):
    """The methods of `measure.Window` (a room above this one) that a draft uses."""

    @property
    def start_memory_bytes(self) -> int: ...

    def joules(self) -> float | None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> None: ...

    def figures(self) -> list[Figure]: ...


W = TypeVar("W", bound=_Window)


class Artifact:
    """A finished folder, or a foreign one (a Hugging Face folder without hone.json) used unchanged."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def read(cls, folder: Path | str) -> Artifact:
        """The artifact in `folder`; a folder without hone.json is foreign and identified by its files.

        Raises ArtifactError when the folder is missing, unfinished (`.partial`) or its hone.json is broken, SpecError for a URL.
        """
        need_local(folder, PULL)
        if str(folder).startswith("hf:"):
            folder = resolve(HUB_FOLDER)(str(folder))
        folder = Path(folder)
        if not folder.is_dir():
            if partial_of(folder).is_dir():
                raise ArtifactError(
                    f"{folder} is unfinished: its stage was interrupted",
                    fix="run the same command again, it resumes where it stopped",
                )
            raise resolve(NO_FOLDER)(folder, _nearest(folder))
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
        """The stage that made it: data, train, compress, eval, serve; 'foreign' when hone did not make it."""
        return self.manifest["kind"]

    @property
    def name(self) -> str:
        return self.manifest["name"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def techniques(self) -> list[dict[str, Any]]:
        """The techniques applied to it, in order, its parents' first."""
        return self.manifest["techniques"]

    @property
    def figures(self) -> dict[str, Figure]:
        return read_figures(self.manifest["figures"], self.folder / MANIFEST)

    @property
    def content(self) -> str:
        """Digest of every content file: equal for two runs of one spec, however often they were killed."""
        return fingerprint({name: row["sha256"] for name, row in content_of(self.manifest).items()})

    def need(self, *files: str) -> None:
        """Raises ArtifactError unless every one of `files` is in the folder."""
        for name in files:
            if not (self.folder / name).exists():
                raise ArtifactError(
                    f"{self.folder} has no {name}", fix="give a folder that a hone stage or transformers wrote"
                )

    @property
    def changed(self) -> str | None:
        """Name of the first content file that differs from hone.json (`changed_file`); None when all are unchanged."""
        content = content_of(self.manifest)
        return changed_file(self.folder, content, self.folder / MANIFEST) if content else None

    def need_unchanged(self) -> None:
        """Raises ArtifactError when a content file changed since the artifact was made, so that its fingerprint is not true."""
        name = self.changed
        if name is not None:
            raise ArtifactError(
                f"{self.folder / name} is no longer the file that {MANIFEST} describes",
                fix=f"put it back, make all of it again with --redo={self.folder.name}, or delete {MANIFEST} to use it as it is",
            )

    def verify(self) -> None:
        """Re-hashes every file. Raises ArtifactError on the first that is missing or differs; some may be deleted."""
        for name, row in present(self.folder, self.manifest["files"]).items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size != row["bytes"] or sha256(path) != row["sha256"]:
                raise ArtifactError(
                    f"{path} is not the file that {MANIFEST} describes", fix="delete the folder and run its stage again"
                )


def parse(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """The manifest in the hone.json at `where`. Raises ArtifactError, with `fix`, when it is broken."""
    try:
        manifest = json.loads(content, parse_int=whole_number)
        known = manifest["format"] == FORMAT
        for name, kind in _FIELDS.items() if known else ():
            if not isinstance(manifest[name], kind):
                raise TypeError(f"{name} is not a {kind.__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where} is corrupt: {type(error).__name__} {error}", fix=fix) from None
    if not known:
        raise ArtifactError(
            f"{where} has format {manifest['format']}, this version of hone reads {FORMAT}",
            fix="use the hone version that wrote it",
        )
    return manifest


class Draft:
    """An artifact being made. `resumed` is true when an earlier run of the same spec was interrupted."""

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
        self._window: _Window | None = None
        self.state.mkdir(exist_ok=True)
        (self.folder / LOG).mkdir(exist_ok=True)
        # Stored, because the stage may clear its state while it runs.
        self._spent_before = self._noted("elapsed_s") or 0.0
        self._joules_before = self._noted("energy_j")

    @property
    def fingerprint(self) -> str:
        return self._identity["fingerprint"]

    @property
    def state(self) -> Path:
        """Files from which a killed stage resumes; removed at commit."""
        return self.folder / STATE

    @property
    def log(self) -> Path:
        """Files that are kept but not content: timings, TensorBoard events."""
        return self.folder / LOG

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on this artifact by this process and by killed ones before it, up to their last `keep_time`."""
        return self._spent_before + time.monotonic() - self._started

    def leave_out(self, seconds: float) -> None:
        """Takes `seconds` in which the work paused out of `elapsed_s`."""
        self._started += seconds

    def _noted(self, name: str) -> float | None:
        """The value that `keep_time` stored under `name`; None without one."""
        try:
            return float((self.state / name).read_text())
        except (OSError, ValueError):
            return None

    def keep_time(self) -> None:
        """Stores the seconds and joules spent so far; call it at every durable step."""
        write_atomic(self.state / "elapsed_s", repr(self.elapsed_s).encode())
        joules = self._joules()
        if joules is not None:
            write_atomic(self.state / "energy_j", repr(joules).encode())

    def _joules(self) -> float | None:
        """Joules of the open window and of killed runs before it, up to their last `keep_time`."""
        now = self._window.joules() if self._window is not None else None
        return None if now is None else now + (self._joules_before or 0.0)

    @contextmanager
    def measuring(self, window: W) -> Iterator[W]:
        """Opens `window` during the work and records its measurements; time and energy of killed runs are added."""
        self._window = window
        with window:
            self._started = time.monotonic()  # imports and warm-up before are not part of the work
            yield window
        self._record_window(window)

    def predict(self, estimates: dict[str, Estimate]) -> None:
        """Sets the estimates of figures before the work; each is joined to the figure of the same name."""
        self._estimates.update(estimates)

    def record(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """Adds figure `name` (see `Figure` for `more`). NaN and infinity are recorded as absent, with a note."""
        if value is not None and not math.isfinite(value):
            note = more.get("note")
            value, more["note"] = None, f"{value}, which is not finite" + (f"; {note}" if note else "")
        self._figures[name] = Figure(name=name, value=value, unit=unit, **more)

    @property
    def figures(self) -> Mapping[str, Figure]:
        """What was recorded so far, by name."""
        return self._figures

    def _record_window(self, window: _Window) -> None:
        """Adds time, peak memory and energy as measured by a `measure.Window`; time includes killed runs.

        The estimate of the peak is the memory in use when the window opened plus the estimated growth.
        """
        growth, before = self._estimates.get("memory_growth_bytes"), window.start_memory_bytes
        if growth is not None:
            formula = f"in use before {human_bytes(before)} + {growth.formula}"
            peak = growth.model_copy(update={"value": before + growth.value, "formula": formula})
            self._estimates.setdefault("peak_memory_bytes", peak)
        for figure in window.figures():
            if figure.name == "time_s":
                note = "with interrupted runs" if self.resumed else ""
                figure = figure.model_copy(update={"value": self.elapsed_s, "note": note})
            elif figure.name == "energy_j" and self.resumed and figure.value is not None:
                before = self._joules_before
                note = "with interrupted runs" if before is not None else "of the last process only"
                update = {"value": figure.value + (before or 0.0), "note": f"{figure.note}; {note}".strip("; ")}
                figure = figure.model_copy(update=update)
            self._figures[figure.name] = figure

    def did(self, technique: dict[str, Any]) -> None:
        """Appends an applied technique (its spec with `kind` and `slot`) to the artifact's techniques."""
        self._techniques.append(technique)

    def command(self, text: str) -> None:
        """Sets the exact command that makes this artifact again."""
        self._command = text

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, _: object = None, error: object = None, *__: object) -> None:
        """Releases the folder for another attempt; removes it when nothing was written yet."""
        release(self.folder, self._lock, None if self.resumed else error)  # what was resumed had gone well before

    def commit(self) -> Artifact:
        """Hashes and syncs the files, writes hone.json, renames the folder. Returns the finished artifact."""
        files = {}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            # A full disk or a kill can leave an incomplete manifest of an earlier attempt.
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
    """The artifact in `out` when it is whole and of the same identity, else None. Raises like `start`."""
    need_local(out, PUSH)
    for parent in parents.values():
        parent.need_unchanged()
    return _finished(out, identify(out, kind, spec, parents, files, run.machine), run, type(spec))


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

    `parents` maps a role ('data', 'model') to its artifact, `files` a field to the file it names; their
    content is part of the identity. Raises DriftError when `out` was made from another spec or other inputs (unless
    `run.redo`), ArtifactError when another process is making it, or a file of it or of a parent was changed.
    """
    need_local(out, PUSH)
    out, run = Path(out), run or Run()
    for parent in (parents or {}).values():
        parent.need_unchanged()
    identity = identify(out, kind, spec, parents or {}, files or {}, run.machine)
    opened = reserve(out, identity, identity["fingerprint"], run, parents or {}, type(spec))
    if isinstance(opened, Artifact):
        return opened
    lock, resumed = opened
    return Draft(out, identity, lock, resumed=resumed, parents=list((parents or {}).values()))


def reserve(
    out: Path,
    identity: dict[str, Any],
    token: str,
    run: Run,
    parents: dict[str, Artifact],
    kind: type[Spec] | None = None,
) -> Artifact | tuple[Any, bool]:
    """The finished artifact of this identity in `out`; else (lock of its partial folder, whether it was started for `token`).

    Raises like `start`.
    """
    there = _finished(out, identity, run, kind)
    if there is not None:
        return there
    _stand_outside(out, parents)
    lock = take(out)
    if run.redo and out.exists():
        shutil.rmtree(out)  # under the lock, so that two processes do not both remove it
    there = _finished(out, identity, run, kind)  # another process may have finished before we had the lock
    if there is not None:
        lock.close()
        shutil.rmtree(partial_of(out), ignore_errors=True)
        return there
    return lock, resume(out, lock, token, run, identity, kind)


def _stand_outside(out: Path, parents: dict[str, Artifact]) -> None:
    """Raises ArtifactError when `out` is inside an artifact or an input, which writing there would change."""
    taken = {parent.folder.resolve() for parent in parents.values()}
    for folder in out.resolve().parents:
        if folder in taken or (folder / MANIFEST).exists():
            raise ArtifactError(
                f"{out} is inside {folder}, which is an input or an artifact", fix="give an output folder beside it"
            )


def _finished(out: Path, identity: dict[str, Any], run: Run, kind: type[Spec] | None = None) -> Artifact | None:
    """The artifact in `out` if it is whole and of this identity; None when there is none; raises on drift.

    `kind` is the class of its spec, which tells circumstances from what drifted.
    """
    if not out.exists():
        return None
    if not (out / MANIFEST).exists():
        raise ArtifactError(
            f"{out} exists and is not an artifact of hone",
            fix="give another output folder; hone overwrites nothing it did not make",
        )
    there = Artifact.read(out)
    if run.redo:
        return None
    if there.manifest["fingerprint"] == identity["fingerprint"]:
        sweep(out)  # its process may have been killed right after the rename
        there.need_unchanged()
        return there
    raise drifted(out, there.manifest, identity, kind)


def _nearest(folder: Path) -> str:
    if not folder.parent.is_dir():
        return f"there is no folder {folder.parent} either"
    beside = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    hint = did_you_mean(folder.name, beside, f"{folder.parent}/{{}}")
    return hint.strip() or f"{folder.parent} holds: {', '.join(sorted(beside)[:8]) or 'no folders'}"
