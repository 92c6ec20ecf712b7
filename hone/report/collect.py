"""Reads a line's artifact folders into rows and joins them by their parents; writes nothing, runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.base.artifact import MANIFEST, Artifact
from hone.base.durable import whole_number
from hone.base.errors import ArtifactError, SpecError, did_you_mean
from hone.base.figure import Figure
from hone.base.spec import read_yaml

_ABSURD = 1e30
KINDS = ("foreign", "data", "train", "teach", "compress", "eval", "serve")
"""Stages in the order of a recipe; unknown kinds come last."""
RECIPE = "recipe.yaml"
"""File that `hone run` writes into a line's folder; the report reads the order of the stages from it."""
CONTENT = {
    "data": ("stats.json", "dropped.jsonl", "sample.jsonl", "contamination.jsonl"),
    "train": ("steps.jsonl", "mixture.json", "log/pipeline.json"),
    "compress": ("layers.jsonl",),
    "serve": ("samples.jsonl",),
}
"""Files beside hone.json that the report reads, by stage."""


@dataclass(frozen=True)
class Parent:
    """One input of an artifact. `id` is its folder name when it is in the line, else 'foreign:<name>'.

    `stale` is true when the line has an artifact of that name made from another spec than the one used.
    """

    role: str
    name: str
    id: str
    fingerprint: str
    stale: bool = False


@dataclass
class Row:
    """One artifact: `id` is its folder's name, `content` its side files by name (without missing ones)."""

    id: str
    kind: str
    name: str
    fingerprint: str
    spec: dict[str, Any]
    figures: dict[str, Figure]
    techniques: list[dict[str, Any]]
    provenance: dict[str, Any]
    machine: dict[str, Any]
    num_bytes: int
    content: dict[str, Any] = field(default_factory=dict)
    parents: list[Parent] = field(default_factory=list)

    def value(self, name: str) -> float | None:
        """The figure's value; None when it is unknown, absent or not a sound number."""
        figure = self.figures.get(name)
        return figure.value if figure is not None and sound(figure.value) else None

    def parent(self, role: str) -> Parent | None:
        return next((parent for parent in self.parents if parent.role == role), None)

    @property
    def command(self) -> str:
        """The command that makes it again; '' when the manifest has none."""
        return str(self.provenance.get("command") or "")


@dataclass
class Line:
    """A line's artifacts, parents before children. `problems` are folders and files that could not be read."""

    name: str
    folder: Path
    rows: list[Row]
    problems: list[tuple[str, str]]
    rates: Any = None
    """`Rates` of `hone.report.sections.prices`, where money and carbon are asked for."""

    def get(self, id: str) -> Row | None:
        return next((row for row in self.rows if row.id == id), None)

    def of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row.kind in kinds]

    @property
    def foreign(self) -> list[Parent]:
        """Inputs from outside the line, each once."""
        return list({parent.id: parent for row in self.rows for parent in row.parents if ":" in parent.id}.values())

    def label(self, id: str) -> str:
        """A short name of an artifact: without its stage where that is unique among the models."""
        row = self.get(id)
        if row is None:
            return id.partition(":")[2] or id
        twins = [other for other in self.of("train", "compress") if other.name == row.name]
        return row.name if len(twins) <= 1 else row.id

    def own_techniques(self, row: Row) -> list[dict[str, Any]]:
        """The techniques of this stage, without those of its first parent."""
        first = self.get(row.parents[0].id) if row.parents else None
        before = first.techniques if first else []
        return row.techniques[len(before) :] if row.techniques[: len(before)] == before else row.techniques


def collect(folder: Path | str) -> Line:
    """Reads every artifact folder in `folder`. Raises ArtifactError when none can be read.

    A broken hone.json, a broken side file and an unfinished stage become `problems`; the rest is still read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, beside, f"{folder.parent}/{{}}")
        if (where := Path("work") / folder).is_dir():  # the folder that `hone run` fills by default
            hint = f"did you mean '{where}'? "
        raise ArtifactError(f"no folder {folder}", fix=f"{hint}check the path")
    rows: list[Row] = []
    problems: list[tuple[str, str]] = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        if path.name.endswith(".partial"):
            problems.append(
                (path.name.removesuffix(".partial"), "unfinished: run the line again, it resumes where it stopped")
            )
        elif (path / MANIFEST).exists():
            try:
                rows.append(_read(path, problems))
            except ArtifactError as error:
                problems.append((path.name, error.what.replace(f"{folder}/", "")))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append((path.name, f"{MANIFEST} is not a valid manifest: {_first_line(error)}"))
    if not rows:
        broken = "".join(f"; {name}: {what}" for name, what in problems)
        raise ArtifactError(
            f"nothing to report: {folder} has no finished artifact{broken}",
            fix="run the line first (`hone run RECIPE`), or give the folder of its artifacts",
        )
    _join(rows, problems)
    return Line(folder.resolve().name, folder, _parents_first(rows, _recipe_order(folder)), problems)


def _read(path: Path, problems: list[tuple[str, str]]) -> Row:
    artifact = Artifact.read(path)
    manifest = artifact.manifest
    row = Row(
        id=path.name,
        kind=str(artifact.kind),
        name=str(artifact.name),
        fingerprint=str(artifact.fingerprint),
        spec=dict(manifest["spec"]),
        figures=artifact.figures,
        techniques=[dict(technique) for technique in artifact.techniques],
        provenance=dict(manifest.get("provenance") or {}),
        machine=dict(manifest.get("machine") or {}),
        num_bytes=sum(int(file["bytes"]) for file in manifest["files"].values()),
    )
    row.parents = [
        Parent(str(parent["role"]), str(parent["name"]), "", str(parent["fingerprint"]))
        for parent in manifest["parents"]
    ]
    changed = artifact.changed
    if changed is not None:
        problems.append(
            (f"{path.name}/{changed}", "changed after the artifact was made: its figures are of what was before")
        )
    for name in CONTENT.get(row.kind, ()):
        if (path / name).exists():
            try:
                row.content[name] = _read_content(path / name)
            except (ValueError, OSError) as error:
                problems.append((f"{path.name}/{name}", f"cannot be read: {_first_line(error)}"))
    return row


def _read_content(path: Path) -> Any:
    """A JSON object, or the objects of a JSONL file. Raises ValueError when it is neither."""
    text = path.read_text(encoding="utf8")
    if path.suffix == ".json":
        values = json.loads(text, parse_int=whole_number)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        return values
    rows = [
        json.loads(line, parse_int=whole_number)
        for line in text.split("\n")  # texts may contain U+2028, a line end for splitlines
        if line.strip()
    ]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is not a JSON object")
    return rows


def _join(rows: list[Row], problems: list[tuple[str, str]]) -> None:
    """Sets each parent's `id`: the artifact of the same fingerprint, preferably also of the same name."""
    by_id = {row.id: row for row in rows}
    for row in rows:
        joined = []
        for parent in row.parents:
            same = sorted(
                (other.id != parent.name, other.id) for other in rows if other.fingerprint == parent.fingerprint
            )
            stale = not same and parent.name in by_id
            id = same[0][1] if same else parent.name if stale else f"foreign:{parent.name.removeprefix('foreign-')}"
            if stale:
                problems.append((row.id, f"was made from an earlier {parent.name} than the current one"))
            joined.append(Parent(parent.role, parent.name, id, parent.fingerprint, stale))
        row.parents = joined


def _recipe_order(folder: Path) -> list[str]:
    """Names of the stages in the line's recipe, without the suffixes of branches."""
    try:
        recipe = read_yaml(folder / RECIPE)
    except (SpecError, OSError):
        return []
    stages = mappings(recipe.get("stages")) if isinstance(recipe, dict) else []
    return ["-".join(str(stage[key]) for key in ("stage", "name") if stage.get(key)) for stage in stages]


def _parents_first(rows: list[Row], recipe: list[str]) -> list[Row]:
    """Topological order; among available rows by stage, then by position in the recipe, then by time."""
    places: dict[str, int] = {}
    for row in rows:
        known = [name for name in recipe if f"{row.id}-".startswith(f"{name}-")]
        places[row.id] = recipe.index(max(known, key=len)) if known else len(recipe)

    def rank(row: Row) -> tuple:
        kind = KINDS.index(row.kind) if row.kind in KINDS else len(KINDS)
        branch = [places[parent.id] for parent in row.parents if parent.id in places] if recipe else []
        return kind, places[row.id], branch, str(row.provenance.get("time", "")), row.id

    waiting, ordered, placed = sorted(rows, key=rank), [], set[str]()
    ids = {row.id for row in rows}
    while waiting:
        free = [row for row in waiting if all(parent.id in placed or parent.id not in ids for parent in row.parents)]
        row = (free or waiting)[0]  # hand-made manifests may have circular parents
        waiting.remove(row)
        ordered.append(row)
        placed.add(row.id)
    return ordered


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def mappings(value: Any) -> list[dict[str, Any]]:
    """The mappings in a list; [] for anything else, since side files may be malformed."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def sound(value: Any) -> bool:
    """Whether `value` is a number that can be drawn: finite, and below 1e30."""
    return isinstance(value, int | float) and abs(value) < _ABSURD  # which NaN is not, either


def finite(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """The pairs of which both are sound numbers."""
    return [(float(x), float(y)) for x, y in pairs if sound(x) and sound(y)]
