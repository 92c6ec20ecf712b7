"""Charts with one row per artifact or step: bars, ranges, estimate ratios, waterfalls, strips; one static SVG each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from markupsafe import Markup

from hone.report import units
from hone.report.compare import CLOSE, Check, error_words, near
from hone.report.svg import Scale, dot, drawing, el, fit, group, line, padded_domain, rect, text, text_width, x_axis


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; `value` None draws no bar but says `note`."""

    label: str
    value: float | None
    note: str = ""
    strong: bool = False


_FARTHEST = 1e9
"""Ratios beyond this are drawn at the axis' end."""
_RATIO_TICKS = (
    (2.0, (0.7, 1, 1.4)),
    (5.0, (0.5, 1, 2)),
    (10.0, (0.2, 0.5, 1, 2, 5)),
    (100.0, (0.1, 1, 10)),
    (10_000.0, (0.01, 0.1, 1, 10, 100)),
    (math.inf, (0.0001, 0.01, 1, 100, 10_000)),
)
"""Ticks of a ratio axis from 1 / limit to limit."""


def bars(rows: Sequence[Bar], width: float, unit: str, label: str) -> Markup:
    """Horizontal bars from zero with their values; an absent value shows its note instead of a bar of 0."""
    step, size = 30.0, 13.0
    name_width = min(width * 0.36, max(text_width(row.label, size) for row in rows) + 12)
    value_width = (
        max([text_width(units.show(row.value, unit), size) for row in rows if row.value is not None], default=0) + 12
    )
    most = max([row.value for row in rows if row.value is not None], default=0.0)
    x = Scale(0.0, most or 1.0, name_width, max(width - value_width, name_width + 20))
    parts: list[Any] = [line(name_width, 0, name_width, step * len(rows), "axis")]
    for index, row in enumerate(rows):
        middle = index * step + step / 2
        name = text(name_width - 10, middle + 4, fit(row.label, name_width - 10, size), "barlabel", "end")
        if row.value is None:
            words = row.note or units.ABSENT
            parts.append(
                group(
                    f"{row.label}: {words}",
                    name,
                    text(name_width + 8, middle + 4, fit(words, width - name_width - 8, 12), "absent"),
                )
            )
        else:
            end = x(row.value)
            parts.append(
                group(
                    f"{row.label}: {units.exact(row.value, unit)}",
                    name,
                    rect(name_width, middle - 8, end - name_width, 16, "bar strong" if row.strong else "bar"),
                    text(end + 7, middle + 4, units.show(row.value, unit), "barvalue"),
                )
            )
    return drawing(width, step * len(rows), label, *parts)


def ranges(rows: Sequence[tuple[str, float, float]], width: float, unit: str, label: str) -> Markup:
    """A line from the low to the high value of each row, on a common axis, logarithmic when they span decades."""
    step, size = 32.0, 13.0
    name_width = min(width * 0.36, max(text_width(name, size) for name, *_ in rows) + 12)
    values = [value for _, *pair in rows for value in pair]
    log = min(values) > 0 and max(values) / min(values) > 8
    x = Scale(
        *(padded_domain(values, log=True) if log else (0.0, max(values) * 1.06 or 1.0)), name_width, width - 24, log
    )
    bottom = step * len(rows)
    parts: list[Any] = [x_axis(x, bottom, unit=unit, count=5 if width > 500 else 3, top=0)]
    for index, (name, low, high) in enumerate(rows):
        middle = index * step + step / 2
        parts.append(
            group(
                f"{name}: {units.exact(low, unit)} to {units.exact(high, unit)}",
                text(name_width - 10, middle + 4, fit(name, name_width - 10, size), "barlabel", "end"),
                line(x(low), middle, x(high), middle, "range"),
                dot(x(low), middle, 5, "point best"),
                dot(x(high), middle, 4, "point other"),
            )
        )
    return drawing(width, bottom + 26, label, *parts)


def means(
    rows: Sequence[tuple[str, Sequence[float], float | None]], width: float, words: Sequence[str], label: str
) -> Markup:
    """For each (name, values, half of the mean's interval): the values as small dots, their mean as a large one on its interval.

    The first row's mean is drawn through all rows; `words` are written at the rows' ends.
    """
    step, size = 36.0, 13.0
    name_width = min(width * 0.42, max(text_width(name, size) for name, *_ in rows) + 14)
    value_width = max(text_width(text, size) for text in words) + 14
    centers = [fmean(values) for _, values, _ in rows]
    reach = [value for _, values, _ in rows for value in values]
    # A rate or a size cannot be below 0, as the interval of few values of it can.
    least = 0.0 if min(reach) >= 0 else -math.inf
    ends = [(max(center - (half or 0), least), center + (half or 0)) for center, (*_, half) in zip(centers, rows)]
    low, high = padded_domain([*reach, *(end for pair in ends for end in pair)], log=False)
    x = Scale(max(low, least), high, name_width, width - value_width)
    bottom = step * len(rows)
    parts: list[Any] = [x_axis(x, bottom, count=5 if width > 500 else 3, top=0)]
    parts.append(line(x(centers[0]), 0, x(centers[0]), bottom, "leader"))
    for index, ((name, values, half), center, pair, shown) in enumerate(zip(rows, centers, ends, words, strict=True)):
        middle = index * step + step / 2
        said = f"{name}: mean {center!r}" + (f", 95 % interval +-{half!r}" if half else "") + f", {len(values)} values"
        parts.append(
            group(
                said,
                text(name_width - 12, middle + 4, fit(name, name_width - 12, size), "barlabel", "end"),
                line(x(pair[0]), middle, x(pair[1]), middle, "range") if half else None,
                *(dot(x(value), middle, 3.5, "point seed") for value in values),
                dot(x(center), middle, 6, "point best" if index else "point right"),
                text(width - 4, middle + 4, shown, "barvalue", "end"),
            )
        )
    return drawing(width, bottom + 26, label, *parts)


def ratios(checks: Sequence[Check], width: float, label: str, *, mixed: bool = False) -> Markup:
    """Estimate / measurement of one figure for each artifact on a log axis around 1; bounds are open and labelled 'limit'.

    The shaded band is +-`CLOSE`, and dots inside it have its color. `mixed` rows are of several figures and labelled with both names.
    """
    step, size, top = 30.0, 13.0, 22.0
    name_width = min(
        width * (0.54 if mixed else 0.42), max(text_width(_row_name(check, mixed), size) for check in checks) + 12
    )
    bottom = top + step * len(checks)
    x, parts = _ratio_axis(checks, name_width, width, top, bottom)
    for index, check in enumerate(checks):
        parts.append(_ratio_row(check, _row_name(check, mixed), x, top + index * step + step / 2, width))
    return drawing(width, bottom + 24, label, *parts)


def ratio_dots(rows: Sequence[tuple[str, Sequence[Check]]], width: float, label: str) -> Markup:
    """Estimate / measurement of every figure's artifacts as dots on one axis, with the number of those inside the band."""
    step, size, top = 34.0, 13.0, 22.0
    name_width = min(width * 0.42, max(text_width(units.label(name), size) for name, _ in rows) + 12)
    bottom = top + step * len(rows)
    x, parts = _ratio_axis([check for _, checks in rows for check in checks], name_width, width, top, bottom)
    for index, (name, checks) in enumerate(rows):
        middle = top + index * step + step / 2
        title = fit(units.label(name), name_width - 10, size)
        parts.append(text(name_width - 10, middle + 4, title, "barlabel", "end"))
        for check in sorted(checks, key=lambda check: -abs(math.log(check.ratio or 1.0))):
            said = f"{check.row.id}, {units.label(name)}: estimate {error_words(check)} the measurement"
            kind = "limited" if check.bound else "right" if near(check.ratio or 0.0) else "wrong"
            parts.append(group(said, dot(x(_within(check.ratio or 1.0)), middle, 4.5, f"point {kind}")))
        inside = sum(near(check.ratio or 0.0) and not check.bound for check in checks)
        parts.append(text(width - 4, middle + 4, f"{inside} of {len(checks)}", "barvalue", "end"))
    return drawing(width, bottom + 24, label, *parts)


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / _FARTHEST), _FARTHEST)


def _ratio_axis(
    checks: Sequence[Check], left: float, width: float, top: float, bottom: float
) -> tuple[Scale, list[Any]]:
    """The scale of these ratios, and the band, the grid and the words of its axis."""
    known = [check.ratio for check in checks if check.ratio is not None]
    reach = min(max([1.5, *(max(ratio, 1 / ratio) for ratio in known)]), _FARTHEST) ** 1.12
    x = Scale(1 / reach, reach, left, width - 62, True)
    ticks = next(marks for limit, marks in _RATIO_TICKS if reach <= limit)
    low, high = 1 / (1 + CLOSE), 1 + CLOSE
    parts: list[Any] = [rect(x(low), top, x(high) - x(low), bottom - top, "band", 0)]
    parts += [line(x(tick), top, x(tick), bottom + 4, "axis" if tick == 1 else "grid") for tick in ticks]
    parts += [text(x(tick), bottom + 17, f"{tick:g}x", "tick", "middle") for tick in ticks]
    words = ("← too low", "too high →") if width - 62 - left > 130 else ("← low", "high →")
    parts += [text(left, 11, words[0], "tick"), text(width - 62, 11, words[1], "tick", "end")]
    return x, parts


def _row_name(check: Check, mixed: bool) -> str:
    return f"{check.row.id}, {units.label(check.figure.name)}" if mixed else check.row.id


def _ratio_row(check: Check, name: str, x: Scale, middle: float, width: float) -> Markup:
    figure, left = check.figure, x.start
    assert figure.estimate is not None, "a check must have an estimate"
    estimate, value = units.exact(figure.estimate.value, figure.estimate.unit), units.exact(figure.value, figure.unit)
    said = f"{name}: estimated {estimate}, measured {value}"
    label = text(left - 10, middle + 4, fit(name, left - 10, 13), "barlabel", "end")
    if check.ratio is None:
        why = fit(figure.note or units.ABSENT, width - left - 8, 12)
        return group(said, label, text(left + 8, middle + 4, why, "absent"))
    end = x(_within(check.ratio))
    if check.bound:
        d = f"M{end:.1f} {middle - 7:.1f}V{middle + 7:.1f}M{end:.1f} {middle:.1f}H{x(1):.1f}"
        said += "; a speed-of-light limit, not a prediction"
        return group(
            said, label, el("path", d=d, class_="limit"), text(width - 4, middle + 4, "limit", "absent", "end")
        )
    far = "right" if near(check.ratio) else "wrong"
    return group(
        said,
        label,
        line(x(1), middle, end, middle, f"stem {far}"),
        dot(end, middle, 5, f"point {far}"),
        text(width - 4, middle + 4, error_words(check), "barvalue", "end"),
    )


def waterfall(steps: Sequence[tuple[str, float, float]], width: float, unit: str, label: str) -> Markup:
    """The input, what each step removed (hanging bars), and the output."""
    step, size = 30.0, 13.0
    shown = [
        ("in", steps[0][1], 0.0, "whole"),
        *((name, before, after, "lost") for name, before, after in steps),
        ("kept", steps[-1][2], 0.0, "kept"),
    ]
    name_width = min(width * 0.34, max(text_width(name, size) for name, *_ in shown) + 14)
    value_width = 78.0
    x = Scale(0.0, max(max(before, after) for _, before, after, _ in shown) or 1.0, name_width, width - value_width)
    parts: list[Any] = [line(name_width, 0, name_width, step * len(shown), "axis")]
    for index, (name, before, after, kind) in enumerate(shown):
        middle = index * step + step / 2
        change = after - before if kind == "lost" else before
        words = units.show(abs(change), unit).removesuffix(" documents").removesuffix(" document")
        words = words if kind != "lost" else "nothing" if change == 0 else f"{'−' if change < 0 else '+'}{words}"
        low, high = sorted((before, after))
        bar = rect(x(low), middle - 8, max(x(high) - x(low), 1.5), 16, f"fall {kind}") if change else None
        join = (
            line(
                x(after if kind == "lost" else before),
                middle + 8,
                x(after if kind == "lost" else before),
                middle + step - 8,
                "leader",
            )
            if index + 1 < len(shown)
            else None
        )
        parts.append(
            group(
                f"{name}: {units.exact(before, unit)}"
                + (f" in, {units.exact(after, unit)} out" if kind == "lost" else ""),
                text(name_width - 10, middle + 4, fit(name, name_width - 10, size), "barlabel", "end"),
                bar,
                join,
                text(x(high) + 7, middle + 4, words, "absent" if change == 0 else "barvalue"),
            )
        )
    return drawing(width, step * len(shown), label, *parts)


def strips(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], width: float, label: str) -> Markup:
    """For each row its (name, value > 0) entries as dots on one log axis, their median as a bar; values are shares."""
    step, size = 34.0, 13.0
    name_width = min(width * 0.36, max(text_width(name, size) for name, _ in rows) + 12)
    x = Scale(
        *padded_domain([value for _, entries in rows for _, value in entries], log=True), name_width, width - 64, True
    )
    bottom = step * len(rows)
    parts: list[Any] = [x_axis(x, bottom, unit="fraction", count=5 if width > 500 else 3, top=0)]
    for index, (name, entries) in enumerate(rows):
        middle = index * step + step / 2
        half = median(value for _, value in entries)
        parts.append(text(name_width - 10, middle + 4, fit(name, name_width - 10, size), "barlabel", "end"))
        parts += [
            group(f"{entry}: {units.exact(value)}", dot(x(value), middle, 4.5, "point other"))
            for entry, value in entries
        ]
        parts.append(
            group(f"{name}: median {units.exact(half)}", rect(x(half) - 1.5, middle - 11, 3, 22, "fall lost", 1))
        )
        parts.append(text(width - 4, middle + 4, units.show(half, "fraction"), "barvalue", "end"))
    return drawing(width, bottom + 26, label, *parts)


class Pass(NamedTuple):
    """One pass of a pipeline's rank: its kind (F, B, I, W, S), whether it is of the rank's second stage, and when it runs."""

    kind: str
    far: bool
    microbatch: int
    said: str
    begin: float
    end: float


_PASSES = {"F": "fall kept", "B": "fall lost", "I": "fall lost", "W": "fall whole", "S": "mark"}

PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradients of weights",
    "S": "optimizer's step",
}
"""What the passes of a pipeline are called in legends, in their order."""


def passes(rows: Sequence[Sequence[Pass]], name: str, width: float) -> Markup:
    """A pipeline schedule over time, a line a rank: forwards, backwards, weight gradients and steps each in its color, a tooltip a
    pass; those of a rank's second stage are lighter. Below them a legend of what is there."""
    scale = Scale(0, max(one.end for row in rows for one in row), 24, width - 4)
    drawn = []
    for rank, row in enumerate(rows):
        top = 4.0 + 24 * rank
        drawn.append(text(4, top + 14, rank, "tick"))
        for one in row:
            left, right = scale(one.begin), scale(one.end)
            inside = str(one.microbatch)
            label = text((left + right) / 2, top + 14, inside, "inside", anchor="middle")
            fits = one.kind != "S" and text_width(inside) <= right - left
            colors = _PASSES.get(one.kind, "mark") + (" far" if one.far else "")
            box = rect(left, top, right - left - 0.5, 20, colors, rx=1)
            drawn.append(group(one.said, box, label if fits else None))
    bottom = 8.0 + 24 * len(rows)
    legend, height = _legend(rows, bottom + 6, width)
    return drawing(width, bottom + 6 + height, f"pipeline schedule {name}", *drawn, *legend)


def _legend(rows: Sequence[Sequence[Pass]], top: float, width: float) -> tuple[list[Markup], float]:
    """A colored square and words for each kind of pass in `rows`, in lines from `top` on, and their height."""
    there = {one.kind for row in rows for one in row}
    entries = [(_PASSES[kind], f"{kind} {words}") for kind, words in PASSES.items() if kind in there]
    if any(one.far for row in rows for one in row):
        entries.append(("fall kept far", "lighter: of the rank's second stage"))
    entries.append(("", "empty: waiting"))
    drawn, left, line = [], 24.0, 0
    for colors, words in entries:
        wide = text_width(words) + (32 if colors else 16)
        if left > 24 and left + wide > width:
            left, line = 24.0, line + 1
        at = top + 20 * line
        if colors:
            drawn.append(rect(left, at + 2, 12, 12, colors, rx=1))
        drawn.append(text(left + (17 if colors else 0), at + 12, words, "tick"))
        left += wide
    return drawn, 20.0 * (line + 1)
