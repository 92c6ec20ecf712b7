"""The text of docs/predictions.md: a summary by room, the table of all pairs, what was left out and why."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.predicted import rates
from benchmarks.predicted.rows import Left, Pair, all_pairs
from hone.base.errors import HoneError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predictions.md"
COMMAND = "python -m benchmarks.predictions"
TEXT = Path(__file__).with_name("predictions.txt")
"""The paragraphs that are written by hand."""

AIMS = {"time": (0.07, 0.20), "memory": (0.05, 0.20), "amount": (0.07, 0.20)}
"""Median and 90th percentile of errors that hone aims at."""


class Line(NamedTuple):
    """A pair with its predictions: of its own call, with measured rates, with the data sheet's. None: there is none."""

    pair: Pair
    call: float | None
    now: float | None
    sheet: float | None
    fresh: str
    """Whether the rates of the first prediction that there is are of the same call."""

    @property
    def best(self) -> float | None:
        """The error that counts: of its own call if it recorded one, else with measured rates."""
        return self.call if self.call is not None else self.now


def line_of(pair: Pair) -> Line:
    """The errors of a pair's predictions."""
    from benchmarks.predicted.estimates import said_of

    found: list[float | None] = []
    fresh = {True: "yes", False: "no", None: "not said"}[pair.fresh] if pair.off(pair.recorded) is not None else "no"
    for made in (rates.measured, rates.of_sheet):
        value = None
        if pair.config is not None and rates.gpu_of(pair.row):
            known = made(pair.row)
            if known is None:
                found.append(None)
                continue
            try:
                value = said_of(pair.config, known.machine).by_unit.get(pair.unit)
            except HoneError:
                value = None
            if pair.recorded is None and made is rates.measured and known.fresh:
                fresh = "yes"
        found.append(None if value is None else pair.off(value))
    call = pair.error if pair.error is not None else None if pair.recorded is None else pair.off(pair.recorded)
    return Line(pair, call, found[0], found[1], fresh)


@cache
def lines() -> tuple[tuple[Line, ...], Left, int]:
    """All pairs with their errors, the rows left out, the number of rows."""
    pairs, left, total = all_pairs()
    return tuple(map(line_of, pairs)), left, total


def spread(errors: Sequence[float | None]) -> tuple[int, float, float] | None:
    """(n, median, 90th percentile) of absolute errors; None without any."""
    known = sorted(abs(one) for one in errors if one is not None)
    if not known:
        return None
    return len(known), statistics.median(known), known[min(int(0.9 * len(known)), len(known) - 1)]


def _cell(found: tuple[int, float, float] | None) -> str:
    return "-" if found is None else f"{found[1]:.1%} / {found[2]:.1%} ({found[0]})"


def summary(all_lines: Sequence[Line]) -> list[str]:
    """Rows of medians and 90th percentiles."""
    rows = [
        "| room | what | in the row's own call | now, measured rates | now, 80 % of the data sheet | aim |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((one.pair.room, one.pair.what) for one in all_lines)
    for room, what in kinds:
        own = [one for one in all_lines if (one.pair.room, one.pair.what) == (room, what)]
        cells = [_cell(spread([getattr(one, name) for one in own])) for name in ("call", "now", "sheet")]
        aim = "{:.0%} / {:.0%}".format(*AIMS[what])
        rows.append(f"| {room} | {what} | {' | '.join(cells)} | {aim} |")
    return rows


def _off(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _short(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B":
        return f"{value / 2**30:.4g} GiB" if value >= 2**30 else f"{value / 2**20:.4g} MiB"
    return f"{value:,.4g} {unit}".rstrip()


def row_of(one: Line) -> str:
    """A line of the table."""
    pair = one.pair
    where = (rates.gpu_of(pair.row) or str(pair.row["machine"].get("cpu") or "CPU")).removeprefix("NVIDIA ")
    ranks = int(pair.row["machine"].get("num_ranks") or 1)
    where = f"{ranks} x {where}" if ranks > 1 else where
    cells = [pair.source, pair.figure.replace("|", "/"), where, _short(pair.measured, pair.unit)]
    return f"| {' | '.join([*cells, _off(one.call), _off(one.now), _off(one.sheet), one.fresh])} |"


def table(all_lines: Sequence[Line]) -> list[str]:
    """A table a room."""
    rows: list[str] = []
    for room in dict.fromkeys(one.pair.room for one in all_lines):
        rows += ["", f"### {room}", ""]
        rows += [
            "| ledger row | figure | machine | measured | own call | measured rates | data sheet | fresh |",
            "|---" * 8 + "|",
        ]
        rows += [row_of(one) for one in all_lines if one.pair.room == room]
    return rows


def left_out(left: Left) -> list[str]:
    """A line a reason."""
    rows = ["| benchmark | rows | why they have no prediction here |", "|---|---|---|"]
    for (benchmark, reason), count in sorted(left.counts.items(), key=lambda one: (one[0][0], -one[1], one[0][1])):
        rows.append(f"| {benchmark} | {count} | {reason} |")
    return rows


def worst(count: int) -> list[str]:
    """The lines that are furthest off."""
    found, _, _ = lines()
    ordered = sorted(found, key=lambda one: -abs(one.best or 0.0))
    return [row_of(one) for one in ordered[:count]]


def text() -> str:
    """The page."""
    found, left, total = lines()
    ways = Counter(one.fresh for one in found)
    parts = TEXT.read_text(encoding="utf8").split("\n---\n")
    assert len(parts) == 3, f"{TEXT.name} has three parts between lines of ---"
    numbers = {"rows": total, "pairs": len(found), "left": sum(left.counts.values()), "fresh": ways["yes"]}
    head, between, end = (part.strip() for part in parts)
    return "\n".join(
        [head.format(**numbers), "", *summary(found), "", between, "", *left_out(left), "", end, *table(found), ""]
    )
