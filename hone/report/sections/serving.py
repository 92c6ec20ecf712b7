"""Serving: repeated runs beside each other, and the settings and figures of every arm."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar, Self

from markupsafe import Markup

from hone.report import arms, bars, units
from hone.report.collect import Line, Row
from hone.report.sections.base import FULL, both
from hone.report.sections.effects import TrialTables

SERVING = (
    "tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "prefix_hit_rate",
    "acceptance_rate",
    "kv_cache_bytes",
    "page_waste",
    "joules_per_token",
)


@dataclass(frozen=True)
class Served:
    """An arm in the table: a text for each of `Serving.paths` and of `Serving.figures`, '' where it has none."""

    arm: arms.Arm
    model: str
    settings: list[str]
    figures: list[str]


@dataclass(frozen=True)
class Serving:
    """Comparisons of repeated serving runs, and a table of all of them: a row per arm, with the settings that differ."""

    id: ClassVar[str] = "serving"
    title: ClassVar[str] = "Serving"
    stages: ClassVar[tuple[str, ...]] = ("serve",)

    trials: list[TrialTables]
    paths: list[str]
    """The settings that differ."""
    figures: list[str]
    """Names of figures."""
    rows: list[Served]
    alone: bool
    """Whether several arms ran, each once."""
    repeated: bool
    waits: Markup | None
    """Time to the first token of each arm."""

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = arms.serving(line)
        if not found:
            return None
        paths = [field for field in dict(found[0].fields) if field not in ("model", "data")][:6]
        names = [name for name in SERVING if any(arm.values(name) for arm in found)]
        trials = [trial for trial in arms.trials(line) if trial.kind == "serve" and len(trial.arms) > 1]
        return cls(
            trials=[TrialTables.of(trial) for trial in trials],
            paths=[units.first_upper(path.removeprefix("engine ")) for path in paths],
            figures=names,
            rows=[
                Served(
                    arm,
                    _model_words(line, arm.rows[0]),
                    [dict(arm.fields).get(path, "") for path in paths],
                    [_with_stdev(arm, name) for name in names],
                )
                for arm in found
            ],
            alone=len(found) > 1 and all(len(arm.rows) == 1 for arm in found),
            repeated=any(len(arm.rows) > 1 for arm in found),
            waits=_waits(found),
        )


def _waits(found: list[arms.Arm]) -> Markup | None:
    waits = [
        (arm.name, fmean(low), fmean(high))
        for arm in found
        if (low := arm.values("ttft_p50_s")) and (high := arm.values("ttft_p99_s"))
    ]
    said = "Time to the first token of each run, median and 99th percentile"
    return both(lambda width: bars.ranges(waits, width, "s", said), FULL) if waits else None


def _with_stdev(arm: arms.Arm, name: str) -> str:
    """A figure's mean over an arm's runs, with their standard deviation if there are several: '1,480 ± 31'."""
    values = arm.values(name)
    if not values:
        return ""
    figure = next(row.figures[name] for row in arm.rows if row.value(name) is not None)
    unit = "" if name in ("tokens_per_s", "joules_per_token") else figure.unit
    mean = units.show(fmean(values), unit, name)
    if len(values) < 2 or not (deviation := stdev(values)):
        return mean
    return f"{mean} ± {units.show(deviation, unit, name)}"


def _model_words(line: Line, row: Row) -> str:
    model, draft = row.parent("model"), row.parent("draft")
    return (line.label(model.id) if model else "?") + (f", drafted by {line.label(draft.id)}" if draft else "")
