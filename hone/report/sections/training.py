"""Trainings: their losses, and the pipeline schedules they were planned with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from markupsafe import Markup

from hone.report import bars, charts, units
from hone.report.collect import Line, Row, mappings, sound
from hone.report.sections.base import FULL, HALF, both

TRAINED = {
    "num_params": "{} parameters",
    "train_tokens": "{} training tokens",
    "val_loss": "validation loss {}",
    "val_bits_per_byte": "{}",
    "time_s": "in {}",
}


class Run(NamedTuple):
    """A training with a chart of it and a sentence."""

    row: Row
    chart: Markup
    words: str


class Sampled(NamedTuple):
    """A training with its prompts, each with (step, text written after it) of every evaluation."""

    row: Row
    texts: list[tuple[str, list[tuple[int, str]]]]


@dataclass(frozen=True)
class Training:
    """Loss curves of every training that wrote its steps, and planned pipeline schedules."""

    id: ClassVar[str] = "loss"
    title: ClassVar[str] = "Training"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    losses: list[Run]
    schedules: list[Run]
    distilled: bool
    """Whether a training had a teacher."""
    samples: list[Sampled]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = losses(line)
        distilled = any(taught(row) for row in line.of("train"))
        return cls(found, schedules(line), distilled, sampled(line)) if found else None


def sampled(line: Line, most: int = 8) -> list[Sampled]:
    """What each training wrote at its evaluations, after at most `most` of its prompts."""
    found = []
    for row in line.of("train"):
        texts: dict[str, list[tuple[int, str]]] = {}
        for entry in mappings(row.content.get("steps.jsonl")):
            for one in mappings(entry.get("samples")):
                if sound(entry.get("step")):
                    texts.setdefault(str(one.get("prompt", "")), []).append((entry["step"], str(one.get("text", ""))))
        if texts:
            found.append(Sampled(row, list(texts.items())[:most]))
    return found


def losses(line: Line) -> list[Run]:
    """Every training with a steps.jsonl. A student's own loss has an axis of its own."""
    rows = [row for row in line.of("train") if any(charts.loss_series(row))]
    domains = {told: charts.loss_domain([row for row in rows if taught(row) == told], told) for told in (False, True)}
    wide = HALF if len(rows) > 1 else FULL
    found = []
    for row in rows:
        words, domain = [], domains[taught(row)]
        for name, said in TRAINED.items():
            if row.value(name) is not None:
                unit = "" if name in ("num_params", "train_tokens") else row.figures[name].unit
                words.append(said.format(units.show(row.value(name), unit, name)))
        if row.value("num_steps") is not None and row.figures["num_steps"].note:
            words.append(f"{row.value('num_steps'):.0f} steps {row.figures['num_steps'].note}")

        def draw(width: float, row: Row = row, domain: Any = domain) -> Markup:
            return charts.loss(row, width, domain, apart=taught(row))

        found.append(Run(row, both(draw, wide), ", ".join(words)))
    return found


def schedules(line: Line) -> list[Run]:
    """Every training with pipeline stages: its schedule as it was planned, from log/pipeline.json."""
    found = []
    for row in line.of("train"):
        plan = row.content.get("log/pipeline.json")
        if not (ranks := _ranks(plan)):
            continue
        seconds, bubble = (value if sound(value := plan.get(name)) else None for name in ("seconds", "bubble"))
        said = f"{plan.get('schedule')}: {units.show(seconds, 's')} of passes in a step as planned, "
        said += f"{units.show(bubble, 'fraction')} of the ranks' time is waiting. A line is a rank; numbers are micro-batches."

        def draw(width: float, ranks: Any = ranks, name: str = str(plan.get("schedule"))) -> Markup:
            return bars.passes(ranks, name, width)

        found.append(Run(row, both(draw, FULL), said))
    return found


def _ranks(plan: Any) -> list[list[bars.Pass]]:
    """The passes of each rank of a planned schedule, [] where one cannot be drawn; a rank without passes keeps its line."""
    ranks = plan.get("ranks") if isinstance(plan, dict) else None
    found: list[list[bars.Pass]] = []
    for rank in ranks if isinstance(ranks, list) else []:
        row = [_pass(one) for one in rank] if isinstance(rank, list) else [None]
        if None in row:
            return []
        found.append([one for one in row if one is not None])
    return found if any(one.end > 0 for row in found for one in row) else []


def _pass(fields: Any) -> bars.Pass | None:
    """The pass with these fields; None where they are not one."""
    if not isinstance(fields, list) or len(fields) != len(bars.Pass._fields):
        return None
    found = bars.Pass(*fields)
    timed = sound(found.begin) and sound(found.end) and 0 <= found.begin <= found.end
    return found if timed and isinstance(found.kind, str) else None


def taught(row: Row) -> bool:
    """Whether a training run had a teacher: its training loss is then another quantity."""
    return row.parent("teacher") is not None
