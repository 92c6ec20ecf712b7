"""Estimates beside measurements: by figure, by artifact, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from markupsafe import Markup

from hone.report import bars, compare, units
from hone.report.collect import Line
from hone.report.sections.base import FULL, HALF, Panel, both

EXACT = 0.02
"""Relative error up to which an estimate follows from the plan, as the size of a folder does, and proves nothing."""
_FIRST = ("time_s", "tokens_per_s", "peak_memory_bytes", "memory_growth_bytes")


class Checked(NamedTuple):
    """An estimate with its measurement, and its error in words."""

    check: compare.Check
    error: str


@dataclass(frozen=True)
class Estimates:
    """All ratios by figure in one chart; the charts by artifact, time and memory first; the table."""

    id: ClassVar[str] = "estimates"
    title: ClassVar[str] = "Estimates"
    stages: ClassVar[tuple[str, ...]] = ()

    overview: Markup | None
    sure: str
    """Figures that are not drawn because they follow from the plan."""
    charts: list[Panel]
    rows: list[Checked]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        checks = compare.checks(line)
        if not checks:
            return None
        names = list(dict.fromkeys(check.figure.name for check in checks))
        names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        known = {name: [check for check in checks if check.figure.name == name and check.ratio] for name in names}
        told = {
            name: found for name, found in known.items() if any(abs((check.ratio or 1) - 1) > EXACT for check in found)
        }
        said = "Estimate over measurement, by figure"
        return cls(
            overview=both(lambda width: bars.ratio_dots(list(told.items()), width, said), FULL) if told else None,
            sure=", ".join(units.label(name) for name, found in known.items() if found and name not in told),
            charts=_charts(checks, names),
            rows=[Checked(check, compare.error_words(check)) for check in checks],
        )


def _charts(checks: list[compare.Check], names: list[str]) -> list[Panel]:
    """A chart of each figure, time and memory first; those of few artifacts share the last one."""
    found, few = [], []
    for name in names:
        of_name = [check for check in checks if check.figure.name == name]
        if len(of_name) < 4 and name not in ("time_s", "peak_memory_bytes"):
            few += of_name
            continue
        title = units.heading(name)
        said = f"{title}: estimate over measurement, by artifact"
        found.append(Panel(title, both(lambda width, of_name=of_name, said=said: bars.ratios(of_name, width, said))))
    if few:
        said = "Other figures: estimate over measurement"
        room = FULL if len(found) % 2 == 0 else HALF  # alone on its line, or beside another
        chart = both(lambda width: bars.ratios(few, width, said, mixed=True), room)
        found.append(Panel("Other figures", chart))
    return found
