"""Comparisons of figures: the Pareto line of models, and estimates against measurements."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hone.base.figure import Figure
from hone.report import units
from hone.report.collect import Line, Row, sound

CLOSE = 0.2
"""Relative error up to which an estimate counts as accurate: the band of the charts."""
NEAR = 0.1
"""Models worse than the best by more than this are left out of the detailed chart."""


@dataclass(frozen=True)
class Point:
    """One evaluated model: its size and its quality (lower is better), `on_line` when no model is better in both.

    `half` is half of the quality's 95 % interval, None where it is not known. `tokens` is the number of training tokens of it and
    of the models whose weights it was initialised from; `longer` tells that it is more than the base model's. Such a model is not on the line: others might be as good after as much training.
    """

    id: str
    model: str
    label: str
    num_bytes: float
    quality: float
    on_line: bool = False
    tokens: float | None = None
    longer: bool = False
    half: float | None = None


@dataclass(frozen=True)
class Change:
    """A relative change of a model's perplexity against the base model's, with its 95 % interval where that is known."""

    by: float
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """'+0.28 %'; 'none' for a change that is smaller than its interval."""
        unclear = self.low is not None and self.high is not None and self.low <= 0 <= self.high
        return "none" if unclear else units.signed_percent(self.by)

    @property
    def exact(self) -> str:
        """The change with its interval, for a tooltip."""
        if self.low is None or self.high is None:
            return f"{units.signed_percent(self.by)}; no interval is known"
        ends = f"{units.signed_percent(self.low)} to {units.signed_percent(self.high)}"
        return f"{units.signed_percent(self.by)}, 95 % interval {ends}"


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
    """The figure by which models are ranked: KL to the base model where all others have it, else `text_metric`.

    KL compares whole distributions, so that it tells models apart whose perplexities differ by chance.
    """
    rows = [row for row in line.of("eval") if row.value(text_metric(line)) is not None]
    others = [row for row in rows if not _of_base(line, row)]
    return (
        "kl_to_reference" if others and all(_kl_to_base(line, row) is not None for row in rows) else text_metric(line)
    )


def _of_base(line: Line, row: Row) -> bool:
    model = row.parent("model")
    return model is not None and model.id == base_model(line)


def _kl_to_base(line: Line, row: Row) -> float | None:
    """KL to the base model, which has none to itself; None where it is not known."""
    reference = row.parent("reference")
    if reference is None or reference.id != base_model(line):
        return 0.0 if _of_base(line, row) else None
    return row.value("kl_to_reference")


def perplexity_change(line: Line, row: Row, base: Row) -> Change | None:
    """How an evaluation's perplexity differs from that of `base`, of the base model; None where it is not known."""
    reference, above = row.parent("reference"), row.figures.get("loss_over_reference")
    if above is not None and sound(above.value) and reference is not None and reference.id == base_model(line):
        by, half = above.value or 0.0, above.half_width if sound(above.half_width) else None
        ends = (None, None) if half is None else (_grown(by - half), _grown(by + half))
        return Change(_grown(by), *ends)
    metric = text_metric(line)
    mine, whole = row.value(metric), base.value(metric)
    return Change(mine / whole - 1) if mine is not None and whole else None


def _grown(nats: float) -> float:
    return math.expm1(min(nats, 50.0))


class NotLearned(NamedTuple):
    """A base model's perplexity and that of a bigram model of the same text, which is no worse; `why` its training ended early."""

    model: str
    perplexity: float
    bigram: float
    why: str


def not_learned(line: Line) -> NotLearned | None:
    """The base model where it does not predict better than a bigram model, so that the quality of what is made from it means
    nothing; None where it does, or this is not known."""
    for row in line.of("eval"):
        mine, bigram = row.value("perplexity"), row.value("bigram_perplexity")
        if _of_base(line, row) and mine is not None and bigram is not None and mine >= bigram:
            trained = line.get(base_model(line) or "")
            steps = trained.figures.get("num_steps") if trained is not None else None
            why = (
                f"{steps.value:.0f} steps {steps.note}"
                if steps is not None and sound(steps.value) and steps.note
                else ""
            )
            return NotLearned(line.label(base_model(line) or ""), mine, bigram, why)
    return None


def quality_unit(line: Line) -> str:
    """The unit of `quality_metric`."""
    metric = quality_metric(line)
    return next((row.figures[metric].unit for row in line.of("eval") if metric in row.figures), "")


def text_metric(line: Line) -> str:
    """The figure of how well models predict the text, of most evaluations: perplexity, else bits per byte, else loss."""
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
        figure = row.figures.get(text_metric(line))
        key = (data.fingerprint if data else "", figure.note if figure else "")
        if model_bytes(line, row) and figure is not None and sound(figure.value) and row.parent("model"):
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
                (_kl_to_base(line, row) if metric == "kl_to_reference" else row.value(metric)) or 0.0,
                tokens=tokens,
                longer=tokens is not None and trained is not None and tokens > trained,
                half=row.figures[metric].half_width
                if metric in row.figures and sound(row.figures[metric].half_width)
                else None,
            )
        )
    fair = [point for point in points if not point.longer]
    best = {fair[index].id for index in pareto([(point.num_bytes, point.quality) for point in fair])}
    points = [replace(point, on_line=point.id in best) for point in points]
    return points, [row for row in line.of("eval") if row not in rows]


def quality_views(points: list[Point]) -> list[tuple[str, list[Point]]]:
    """(title, points) of the charts to draw: all, and the good ones alone where bad ones compress the scale.

    A best one of 0 is the reference itself, and the scale is logarithmic.
    """
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
        if isinstance(technique.get("sparsity"), int | float) and technique["sparsity"]:
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


def near(ratio: float) -> bool:
    """Whether an estimate over its measurement is within the band."""
    return 1 / (1 + CLOSE) <= ratio <= 1 + CLOSE


def error_words(check: Check) -> str:
    """Estimate over measurement, as the charts draw it: '1.12x', '0.08x'; 'limit' for a bound, '' when unknown."""
    if check.bound:
        return "limit"
    return "" if check.ratio is None else f"{units.three(check.ratio)}x"
