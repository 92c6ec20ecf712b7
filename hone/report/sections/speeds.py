"""Speed and energy: tokens per second of trainings and serving runs, joules per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from markupsafe import Markup

from hone.report import arms, bars, units
from hone.report.collect import Line, Row
from hone.report.green import green
from hone.report.sections.base import FULL, HALF, Panel, both


@dataclass(frozen=True)
class Speeds:
    """Training speed, generation speed and energy per token; a panel without a chart says why there is none."""

    id: ClassVar[str] = "speed"
    title: ClassVar[str] = "Speed"
    stages: ClassVar[tuple[str, ...]] = ("train", "serve")

    panels: list[Panel]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = _panels(line)
        return cls(found) if found else None


def _panels(line: Line) -> list[Panel]:
    found = []
    served = [arm.rows[0] for arm in arms.serving(line) if len(arm.rows) == 1]  # repeated ones have their own section
    for title, rows, words in (
        ("Training, tokens per second", line.of("train"), _mfu_words(line)),
        ("Generation, tokens per second", served, ""),
    ):
        shown = [_bar(row, "tokens_per_s") for row in rows if "tokens_per_s" in row.figures]
        if shown:
            notes = {row.figures["tokens_per_s"].note for row in rows if "tokens_per_s" in row.figures} - {""}
            words = ". ".join([units.first_upper("; ".join(sorted(notes)))] * bool(notes) + [words] * bool(words))
            chart = both(lambda width, shown=shown, title=title: bars.bars(shown, width, "tokens/s", title))
            found.append(Panel(title, chart, words))
    wide = FULL if len(found) % 2 == 0 else HALF
    rows = [row for row in line.of("train", "serve") if "joules_per_token" in row.figures]
    if any(row.value("joules_per_token") is not None for row in rows):
        shown = [_bar(row, "joules_per_token") for row in rows]
        chart = both(lambda width: bars.bars(shown, width, "J/token", "Joules per token"), wide)
        found.append(Panel("Joules per token", chart))
    elif line.of("train", "serve"):
        notes = sorted(
            {
                note
                for row in line.rows
                for name in ("joules_per_token", "energy_j")
                if name in row.figures and (note := row.figures[name].note)
            }
        )
        why = notes[0] if notes else "no energy sensor was found when the stages ran"
        said = f"not measured, {why.rstrip('.').removeprefix('no energy: ')}."
        found.append(Panel("Joules per token", Markup(""), said))
    rated = [one for one in green(line) if one.quality_per_kwh is not None and one.row.kind == "train"]
    if len(rated) > 1:  # one alone is compared with nothing
        shown = [bars.Bar(one.row.name, one.quality_per_kwh, "", strong=True) for one in rated]
        chart = both(lambda width: bars.bars(shown, width, "", "Quality a kWh"))
        words = "Probability of the right token on the val split, exp(-loss), a kilowatt-hour of training."
        found.append(Panel("Quality a kWh", chart, words))
    return found


def _mfu_words(line: Line) -> str:
    known = [
        f"{row.name} {units.show(row.value('mfu'), 'fraction')}"
        for row in line.of("train")
        if row.value("mfu") is not None
    ]
    return f"Share of this machine's calibrated matmul rate (MFU): {', '.join(known)}." if known else ""


def _bar(row: Row, name: str) -> bars.Bar:
    figure = row.figures[name]
    return bars.Bar(row.name, row.value(name), figure.note or "not measured", strong=row.kind == "train")
