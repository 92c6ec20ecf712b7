"""What the figures say against each other: Pareto line, one-change pairs, estimates against measurements."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hone.base.figure import Figure
from hone.report import units
from hone.report.collect import Line, Row, sound

NEAR = 0.1
"""Models worse than the best by more than this are left out of the closer look."""


@dataclass(frozen=True)
class Point:
    """One evaluated model: its size and its quality (lower is better), `on_line` when nothing beats it in both."""

    id: str
    model: str
    label: str
    num_bytes: float
    quality: float
    on_line: bool = False


@dataclass(frozen=True)
class Pair:
    """Two serving runs that differ in one thing: `path` was `before` in `base` and is `after` in `other`."""

    base: Row
    other: Row
    path: str
    before: Any
    after: Any
    ratio: float


@dataclass(frozen=True)
class Check:
    """One estimate beside its measurement. `ratio` is estimate / measurement, None when it cannot be formed."""

    row: Row
    figure: Figure
    ratio: float | None

    @property
    def bound(self) -> bool:
        return self.figure.estimate is not None and self.figure.estimate.bound


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates (smaller is better), by the first coordinate.

    Of equal points only the first is taken.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def quality_metric(line: Line) -> str:
    """The quality figure that most evaluations have: perplexity, else bits per byte, else loss."""
    counts = Counter(
        name
        for row in line.of("eval")
        for name in ("perplexity", "bits_per_byte", "loss")
        if row.value(name) is not None
    )
    return max(("perplexity", "bits_per_byte", "loss"), key=lambda name: counts[name])


def quality_points(line: Line) -> tuple[list[Point], list[Row]]:
    """Evaluated models as points, and the evaluations left out (no size, no quality, or on other data or windows).

    Only evaluations of one data set under one spec are comparable; the largest such group is taken.
    """
    metric = quality_metric(line)
    groups: dict[tuple, list[Row]] = {}
    for row in line.of("eval"):
        data = row.parent("data")
        figure = row.figures.get(metric)
        key = (data.fingerprint if data else "", figure.note if figure else "")
        if model_bytes(line, row) and row.value(metric) is not None and row.parent("model"):
            groups.setdefault(key, []).append(row)
    rows = max(groups.values(), key=len) if groups else []
    raw = []
    for row in rows:
        model = row.parent("model")
        assert model is not None, "grouped above only with a model"
        raw.append((row, model.id, model_bytes(line, row) or 0.0, row.value(metric) or 0.0))
    best = set(pareto([(size, quality) for _, _, size, quality in raw]))
    points = [
        Point(row.id, model, line.label(model), size, quality, index in best)
        for index, (row, model, size, quality) in enumerate(raw)
    ]
    return points, [row for row in line.of("eval") if row not in rows]


def quality_views(points: list[Point]) -> list[tuple[str, list[Point]]]:
    """(title, points) of the charts to draw: all, and a closer look at the good where bad ones squeeze them together."""
    best = min(point.quality for point in points)
    near = [point for point in points if point.quality <= best * (1 + NEAR)]
    if best <= 0 or not 2 <= len(near) < len(points):
        return [("", points)]
    return [("All models", points), (f"A closer look: within {100 * NEAR:.0f} % of the best", near)]


def model_bytes(line: Line, row: Row) -> float | None:
    """Size of the model behind an evaluation or a serving run; None when nobody measured it."""
    own = row.value("model_bytes")
    model = row.parent("model")
    behind = line.get(model.id) if model else None
    return own or (behind.value("model_bytes") if behind else None)


def base_model(line: Line) -> str | None:
    """Id of the model that the variants come from: the train artifact or foreign model most compressions start from."""
    sources = Counter(parent.id for row in line.of("compress") if (parent := row.parent("model")) is not None)
    roots = {id: count for id, count in sources.items() if (row := line.get(id)) is None or row.kind == "train"}
    if roots:
        return max(roots, key=lambda id: roots[id])
    return next((row.id for row in line.of("train")), None)


def technique_words(techniques: list[dict[str, Any]]) -> str:
    """Techniques in a few words: 'gptq 4-bit', 'magnitude 50 % sparse'."""
    words = []
    for technique in techniques:
        parts = [str(technique.get("kind") or technique.get("slot") or "?")]
        if isinstance(technique.get("bits"), int | float):
            parts.append(f"{technique['bits']:g}-bit")
        if isinstance(technique.get("sparsity"), int | float):
            parts.append(f"{100 * technique['sparsity']:.3g} % sparse")
        words.append(" ".join(parts))
    return ", ".join(words)


def lineage_words(line: Line, id: str) -> str:
    """What was done to a model since it was trained: 'magnitude 50 % sparse, gptq 4-bit', 'distilled from base'."""
    words: list[str] = []
    row = line.get(id)
    while row is not None and row.kind == "compress":
        words.insert(0, technique_words(line.own_techniques(row)) or row.name)
        model = row.parent("model")
        row = line.get(model.id) if model else None
    if row is not None and (teacher := row.parent("teacher")):
        words.insert(0, f"distilled from {line.label(teacher.id)}")
    return ", ".join(words) or ("as trained" if row is not None else "from outside")


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Fields in which two specs differ, (dotted path, one's value, other's value); a missing mapping counts once."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in [*one, *(key for key in other if key not in one)]:
            found += differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
        return found
    return [] if one == other else [(path, one, other)]


def changes(line: Line, one: Row, other: Row) -> list[tuple[str, Any, Any]]:
    """What differs between two serving runs: spec fields and inputs; a draft model belongs to its drafter."""
    found = differences(one.spec, other.spec)
    for role in sorted({parent.role for row in (one, other) for parent in row.parents}):
        before, after = one.parent(role), other.parent(role)
        if (before and before.fingerprint) != (after and after.fingerprint):
            found.append((role, before and line.label(before.id), after and line.label(after.id)))
    drafters = [path for path, *_ in found if "draft" in path and path != "draft"]
    return [change for change in found if not (change[0] == "draft" and drafters)]


def serving_pairs(line: Line) -> list[Pair]:
    """Serving runs that differ in exactly one thing from the run most others differ little from."""
    rows = [row for row in line.of("serve") if row.value("tokens_per_s")]
    single = {
        row.id: [(other, found[0]) for other in rows if len(found := changes(line, row, other)) == 1] for row in rows
    }
    if not any(single.values()):
        return []
    base = max(rows, key=lambda row: len(single[row.id]))
    return [
        Pair(base, other, path, before, after, (other.value("tokens_per_s") or 0) / (base.value("tokens_per_s") or 1))
        for other, (path, before, after) in single[base.id]
    ]


def setting(path: str, value: Any) -> str:
    """A changed field in words: 'continuous batching', 'prefix cache on', 'no drafter', 'model int4'."""
    name = path.rpartition(".")[2].replace("_", " ")
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if value is None:
        return f"no {name}"
    if isinstance(value, dict):
        kind = str(value.get("kind") or "on").replace("_", " ")
        return kind if name in kind else f"{kind} as {name}"
    return f"{value} {name}" if isinstance(value, str) and path not in ("model", "data", "draft") else f"{name} {value}"


def short(value: Any) -> str:
    """A spec's value in a few words: 'on', 'none', 'model (num tokens 4)', techniques as `technique_words` has them."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        rest = ", ".join(
            f"{key.replace('_', ' ')} {entry}"
            for key, entry in value.items()
            if key != "kind" and not isinstance(entry, dict | list)
        )
        kind = str(value.get("kind") or "").replace("_", " ")
        return f"{kind} {f'({rest})' if rest else ''}".strip()
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return technique_words(value)
    return "none" if value is None or value == [] else value if isinstance(value, str) else json.dumps(value)


def checks(line: Line) -> list[Check]:
    """Every estimate of the line beside its measurement, in the line's order."""
    found = []
    for row in line.rows:
        for figure in row.figures.values():
            if figure.estimate is not None:
                value, estimate = figure.value, figure.estimate.value
                drawn = value is not None and sound(value) and sound(estimate) and value > 0 and estimate > 0
                found.append(Check(row, figure, estimate / value if drawn and value else None))
    return found


def error_words(check: Check) -> str:
    """The estimate's error: '+12 %', '12.2x off' beyond a factor of 3, 'limit' for a bound, '' when unknown."""
    if check.bound:
        return "limit"
    if check.ratio is None:
        return ""
    if check.ratio > 3 or check.ratio < 1 / 3:
        return f"{units.three(max(check.ratio, 1 / check.ratio))}x off"
    error = 100 * (check.ratio - 1)
    return "0 %" if abs(error) < 0.05 else f"{error:+.{0 if abs(error) >= 0.95 else 1}f} %"
