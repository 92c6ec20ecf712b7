"""Comparisons of figures: the Pareto line of models, and estimates against measurements."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from hone.base.figure import Figure
from hone.report import units
from hone.report.collect import Line, Row, sound

NEAR = 0.1
"""Models worse than the best by more than this are left out of the detailed chart."""


@dataclass(frozen=True)
class Point:
    """One evaluated model: its size and its quality (lower is better), `on_line` when no model is better in both.

    `tokens` is the number of training tokens of it and of the models whose weights it was initialised from; `longer` tells that
    it is more than the base model's. Such a model is not on the line: others might be as good after as much training.
    """

    id: str
    model: str
    label: str
    num_bytes: float
    quality: float
    on_line: bool = False
    tokens: float | None = None
    longer: bool = False


@dataclass(frozen=True)
class Check:
    """One estimate with its measurement. `ratio` is estimate / measurement, None when undefined."""

    row: Row
    figure: Figure
    ratio: float | None

    @property
    def bound(self) -> bool:
        return self.figure.estimate is not None and self.figure.estimate.bound


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other is better than in both coordinates (smaller is better), by the first coordinate.

    Of equal points only the first is taken.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def quality_metric(line: Line) -> str:
    """The quality figure of most evaluations: perplexity, else bits per byte, else loss."""
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
    base = base_model(line)
    trained = tokens_seen(line, base) if base else None
    points = []
    for row in rows:
        model = row.parent("model")
        assert model is not None, "rows without a model were left out above"
        tokens = tokens_seen(line, model.id)
        points.append(
            Point(
                row.id,
                model.id,
                line.label(model.id),
                model_bytes(line, row) or 0.0,
                row.value(metric) or 0.0,
                tokens=tokens,
                longer=tokens is not None and trained is not None and tokens > trained,
            )
        )
    fair = [point for point in points if not point.longer]
    best = {fair[index].id for index in pareto([(point.num_bytes, point.quality) for point in fair])}
    points = [replace(point, on_line=point.id in best) for point in points]
    return points, [row for row in line.of("eval") if row not in rows]


def quality_views(points: list[Point]) -> list[tuple[str, list[Point]]]:
    """(title, points) of the charts to draw: all, and the good ones alone where bad ones compress the scale."""
    best = min(point.quality for point in points)
    near = [point for point in points if point.quality <= best * (1 + NEAR)]
    if best <= 0 or not 2 <= len(near) < len(points):
        return [("", points)]
    return [("All models", points), (f"A closer look: within {100 * NEAR:.0f} % of the best", near)]


def model_bytes(line: Line, row: Row) -> float | None:
    """Size of the model of an evaluation or a serving run; None when unknown."""
    own = row.value("model_bytes")
    model = row.parent("model")
    behind = line.get(model.id) if model else None
    return own or (behind.value("model_bytes") if behind else None)


def tokens_seen(line: Line, id: str) -> float | None:
    """Training tokens of a model's weights: its own, and those of the model from which it was initialised."""
    row = line.get(id)
    if row is None:
        return None
    if row.kind != "train":
        model = row.parent("model")
        return tokens_seen(line, model.id) if model and model.id != id else None
    own = row.value("train_tokens")
    start = row.parent("model") or (row.parent("teacher") if row.spec.get("init") == "teacher" else None)
    before = tokens_seen(line, start.id) if start and start.id != id else 0.0
    return None if own is None or before is None else own + before


def stored_bits(line: Line, id: str) -> float | None:
    """Bits per weight of a model's folder, scales included; None when its size or its parameters are not known."""
    row = line.get(id)
    if row is None:
        return None
    size, params = row.value("model_bytes"), row.value("num_params")
    return row.value("bits_per_weight") or (8 * size / params if size and params else None)


def base_model(line: Line) -> str | None:
    """Id of the model that the variants were made from: the train artifact or foreign model of most compressions."""
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
    """The techniques applied to a model after training: 'magnitude 50 % sparse, gptq 4-bit', 'distilled from base'."""
    words: list[str] = []
    row = line.get(id)
    while row is not None and row.kind == "compress":
        words.insert(0, technique_words(line.own_techniques(row)) or row.name)
        model = row.parent("model")
        row = line.get(model.id) if model else None
    if row is not None and (teacher := row.parent("teacher")):
        words.insert(0, f"distilled from {line.label(teacher.id)}")
    return ", ".join(words) or ("as trained" if row is not None else "from outside")


def short(value: Any) -> str:
    """A spec's value in a few words: 'on', 'none', 'model (num tokens 4)', techniques by `technique_words`."""
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
    """Every estimate of the line with its measurement, in the line's order."""
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
