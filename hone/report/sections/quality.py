"""Quality against size: the evaluated models in charts and a table, and what a compression changed layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from hone.report import bars, charts, compare, units
from hone.report.collect import Line, Row, finite, sound
from hone.report.sections.base import FULL, HALF, Panel, both


@dataclass(frozen=True)
class Evaluated:
    """One evaluated model in the table; texts are '' where a figure is unknown or has nothing to be compared with."""

    row: Row
    """Its evaluation."""
    label: str
    words: str
    """The techniques that made it."""
    num_bytes: float
    bits: str
    """Stored bits a weight."""
    tokens: str
    """Tokens it was trained on."""
    smaller: str
    """Than the model of the line: '3.9x'."""
    change: compare.Change | None
    """Of its perplexity from that model's."""
    kl: str
    """KL to that model with half of its 95 % interval."""


@dataclass(frozen=True)
class Quality:
    """The evaluated models. `metric` is the figure of the held-out text; `by_kl` says that models are ranked by KL instead."""

    id: ClassVar[str] = "quality"
    title: ClassVar[str] = "Quality"
    stages: ClassVar[tuple[str, ...]] = ("eval", "compress")

    charts: list[Panel]
    rows: list[Evaluated]
    metric: str
    by_kl: bool
    few: compare.NotLearned | None
    """Set where the model of the line is not trained enough for its quality to mean anything."""
    note: str
    layers: list[Panel]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        points, left_out = compare.quality_points(line)
        if not points:
            return None
        metric, unit = compare.quality_metric(line), compare.quality_unit(line)
        views = compare.quality_views(points)
        wide = HALF if len(views) > 1 else FULL
        return cls(
            charts=[
                Panel(title, both(lambda width, seen=seen: charts.quality(seen, width, metric, unit), wide))
                for title, seen in views
            ],
            rows=_rows(line, points),
            metric=compare.text_metric(line),
            by_kl=metric == "kl_to_reference",
            few=compare.not_learned(line),
            note=_note(line, points, left_out),
            layers=_layers(line),
        )


def _rows(line: Line, points: list[compare.Point]) -> list[Evaluated]:
    """The models from the largest to the smallest, of one size the best first."""
    base = next((point for point in points if point.model == compare.base_model(line)), None)
    whole = line.get(base.id) if base else None
    found = []
    for point in sorted(points, key=lambda point: (-point.num_bytes, point.quality)):
        row = line.get(point.id)
        assert row is not None, "points are made of the line's rows"
        compared = base is not None and point is not base
        bits = compare.stored_bits(line, point.model)
        found.append(
            Evaluated(
                row=row,
                label=point.label,
                words=compare.lineage_words(line, point.model),
                num_bytes=point.num_bytes,
                bits=f"{bits:.3g}" if bits else "",
                tokens=units.show(point.tokens, "") if point.tokens else "",
                smaller=_smaller(base.num_bytes, point.num_bytes) if compared and base else "",
                change=compare.perplexity_change(line, row, whole) if compared and whole else None,
                kl=_with_interval(row, "kl_to_reference"),
            )
        )
    return found


def _with_interval(row: Row, name: str) -> str:
    """A figure's value and half of its 95 % interval: '0.0093 ± 0.0011'."""
    value = row.value(name)
    if value is None:
        return ""
    half = row.figures[name].half_width
    if not half or not sound(half):
        return units.three(value)
    if abs(value) < 1e-4:
        return f"{units.three(value)} ± {units.three(half, 2)}"
    places = max(units.decimals(half) - 1, 0)  # two digits of the interval
    return f"{units.fixed(value, places)} ± {units.fixed(half, places)}"


def _note(line: Line, points: list[compare.Point], left_out: list[Row]) -> str:
    """The conditions of the evaluations, and what is not compared."""
    text = compare.text_metric(line)
    rows = [row for row in line.of("eval") if row.id == points[0].id]
    note = f"{units.heading(text)}: {rows[0].figures[text].note}. " if rows[0].figures[text].note else ""
    if (bigram := rows[0].value("bigram_perplexity")) is not None:
        note += f"A bigram model of the training text has {units.three(bigram)} ({rows[0].figures['bigram_perplexity'].note}). "
    if any(
        row.figures["loss_over_reference"].half_width for row in line.of("eval") if "loss_over_reference" in row.figures
    ):
        note += "± is half of a 95 % interval over documents; a change is none where its interval contains 0. "
    trained = next((row.figures["val_loss"].note for row in line.of("train") if row.value("val_loss") is not None), "")
    if trained:
        note += f"The validation loss of a training run is another figure ({trained}): compare models by this table. "
    longer = [point.label for point in points if point.longer]
    if longer:
        note += (
            f"{', '.join(longer)}: trained on more tokens than the model of the line, so that a better figure may not come "
            "from its techniques; left out of the line. "
        )
    if left_out:
        note += f"Not comparable (other data, other window, or no figure) and left out: {', '.join(row.id for row in left_out)}."
    return note


def _smaller(before: float, after: float) -> str:
    return "same size" if abs(before / after - 1) < 0.005 else f"{units.three(before / after)}x"


def _layers(line: Line) -> list[Panel]:
    """The errors layer by layer: of outputs; of weights where no run had calibration text.

    A method that uses calibration text accepts larger weight errors for smaller output errors, so that weight errors of
    methods with and without it cannot be compared.
    """
    for key, title, words in (
        ("error", "Output error, layer by layer", "Relative error of each linear's output on the calibration text."),
        (
            "weight_error",
            "Weight error, layer by layer",
            "Relative error of the weights alone: no calibration text was given, so that output errors are not known.",
        ),
    ):
        entries, without = [], []
        for row in line.of("compress"):
            layers = row.content.get("layers.jsonl") or []
            pairs = finite((index, entry.get(key)) for index, entry in enumerate(layers))
            dots = [(str(layers[int(index)].get("name", "?")), error) for index, error in pairs if error > 1e-30]
            entries += [(row.name, dots)] if dots else []
            without += [row.name] if not pairs and layers else []
        if entries:
            chart = both(lambda width, entries=entries, title=title: bars.strips(entries, width, title))
            missing = f" Without calibration text, so not known: {', '.join(without)}." if without else ""
            return [Panel(title, chart, f"{words} Log scale; the bar is the median.{missing}")]
    return []
