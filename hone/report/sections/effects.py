"""Effects over seeds: arms beside the first of their kind, in a chart and in tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from markupsafe import Markup

from hone.report import arms, bars, units
from hone.report.collect import Line
from hone.report.sections.base import FULL, both


class Link(NamedTuple):
    """An artifact of an arm: `rest` of its id after the arm's stem, and its value in full for a tooltip."""

    id: str
    rest: str
    exact: str


@dataclass(frozen=True)
class EffectRow:
    """One arm's figure as text; texts that do not apply are ''."""

    effect: arms.Effect
    label: str
    n: int
    mean: str
    stdev: str
    difference: str
    """To the first arm's mean."""
    interval: str
    """95 % of that difference: 'LOW to HIGH'."""
    verdict: str
    tone: str
    """'good', 'bad' or ''."""
    stem: str
    """What the ids of `artifacts` begin with."""
    artifacts: list[Link]


@dataclass(frozen=True)
class EffectTable:
    """One figure of a trial's arms, as text of equal precision; fractions in percent."""

    name: str
    unit: str
    rows: list[EffectRow]
    better: str
    """'higher is better', 'lower is better' or ''."""
    note: str


@dataclass(frozen=True)
class TrialTables:
    """A trial: a chart of its main figure (None of a single arm), that figure's table, and those of the others."""

    trial: arms.Trial
    chart: Markup | None
    main: EffectTable
    others: list[EffectTable]

    @classmethod
    def of(cls, trial: arms.Trial) -> Self:
        tables = [effect_table(trial, name) for name in trial.figures]
        return cls(trial, _means(trial, tables[0]) if len(trial.arms) > 1 else None, tables[0], tables[1:])


@dataclass(frozen=True)
class Effects:
    """Every trial of arms over seeds except serving runs."""

    id: ClassVar[str] = "effect"
    title: ClassVar[str] = "Effect over seeds"
    stages: ClassVar[tuple[str, ...]] = ()

    trials: list[TrialTables]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = [TrialTables.of(trial) for trial in arms.trials(line) if trial.kind != "serve"]
        return cls(found) if found else None

    @property
    def lone(self) -> list[TrialTables]:
        """Those of a single arm."""
        return [entry for entry in self.trials if not entry.chart]

    @property
    def comparisons(self) -> int:
        """The number of differences with an interval."""
        tables = [table for entry in self.trials for table in (entry.main, *entry.others)]
        return sum(bool(row.interval) for table in tables for row in table.rows)


def effect_table(trial: arms.Trial, name: str) -> EffectTable:
    """Figure `name` of a trial's arms."""
    effects = trial.effects(name)
    figure = next(row.figures[name] for arm in trial.arms for row in arm.rows if row.value(name) is not None)
    percent = name in units.PERCENT or figure.unit == "fraction"
    scale, unit = (100.0, "%") if percent else (1.0, figure.unit)
    deviations = [effect.stdev * scale for effect in effects if effect.stdev]
    places = units.decimals(min(deviations, default=abs(effects[0].mean * scale) or 1.0))

    def words(value: float | None, *, signed: bool = False) -> str:
        return "" if value is None else units.fixed(value * scale, places, signed=signed)

    rows = []
    for effect in effects:
        found = effect.difference
        good = arms.direction(name) * found.by if found is not None and found.clear else 0
        ends = [words(found.by + way * found.half, signed=True) for way in (-1, 1)] if found is not None else []
        stem = arms.stem([row.id for row in effect.arm.rows])
        rows.append(
            EffectRow(
                effect=effect,
                label=_arm_label(trial, effect.arm),
                n=len(effect.values),
                mean=words(effect.mean),
                stdev=words(effect.stdev),
                difference=words(found.by, signed=True) if found is not None else "",
                interval=" to ".join(ends),
                verdict=effect.verdict,
                tone="good" if good > 0 else "bad" if good < 0 else "",
                stem=stem,
                artifacts=[
                    Link(row.id, row.id.removeprefix(stem), units.exact(row.value(name), figure.unit))
                    for row in effect.arm.rows
                ],
            )
        )
    better = {1: "higher is better", -1: "lower is better", 0: ""}[arms.direction(name)]
    return EffectTable(name, unit, rows, better, figure.note)


def _arm_label(trial: arms.Trial, arm: arms.Arm) -> str:
    """The label of an arm in a table: the fields in which arms differ; for a serving arm its name and its changes."""
    if trial.kind != "serve":
        return arm.label
    return arm.name if arm is trial.arms[0] else f"{arm.name}: {arm.change_from(trial.arms[0])}"


def _means(trial: arms.Trial, table: EffectTable) -> Markup:
    scale = 100.0 if table.unit == "%" else 1.0
    effects = [row.effect for row in table.rows]
    rows = [
        (
            effect.arm.name if trial.kind == "serve" else effect.arm.short,
            [value * scale for value in effect.values],
            effect.half and effect.half * scale,
        )
        for effect in effects
    ]
    said = f"{units.label(table.name)} of {len(rows)} arms over their seeds, with 95 % intervals"
    return both(lambda width: bars.means(rows, width, [row.mean for row in table.rows], said), FULL)
