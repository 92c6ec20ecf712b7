"""Experts: how busy each expert of a mixture was, a heat map of experts by layers for each training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from hone.report import charts
from hone.report.collect import Line
from hone.report.sections.base import FULL, Panel, both


@dataclass(frozen=True)
class Experts:
    """The loads of experts, a panel a training that has them."""

    id: ClassVar[str] = "experts"
    title: ClassVar[str] = "Experts"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    loads: list[Panel]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = [
            Panel(row.id, both(partial(charts.experts, row), FULL), charts.experts_words(row))
            for row in line.of("train")
            if charts.expert_loads(row)
        ]
        return cls(found) if found else None
