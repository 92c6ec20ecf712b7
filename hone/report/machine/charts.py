"""Curves of a machine: latency and bandwidth by size, bandwidth by threads, latency by traffic, the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hone.report import units
from hone.report.machine.roofline import Point, Roof
from hone.report.svg import Scale, dot, drawing, group, line, padded_domain, path, text, text_width, x_axis, y_axis

LINES = ("curve", "val", "plain", "stroked")
DOTS = ("point right", "point best", "point other", "point limited")
"""Classes of successive series."""


@dataclass(frozen=True)
class Series:
    """One curve: its name, and points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A quantity: what it is, its unit, and whether its scale is logarithmic."""

    name: str
    unit: str = ""
    log: bool = True
    suffix: str = ""
    """The unit where the axis' name has it and its ticks do not, as 'GB/s'."""
    at: Sequence[float] = ()
    """The only ticks, as numbers of threads; (): round ones."""

    def words(self, value: float) -> str:
        """A value with its unit."""
        return f"{units.show(value, self.unit)} {self.suffix}".rstrip()


def curves(
    series: Sequence[Series], x: Axis, y: Axis, width: float, label: str, marks: Sequence[tuple[float, str]] = ()
) -> Markup:
    """Series of points joined by lines, with a legend; `marks` are vertical lines (x, name), as the sizes of caches."""
    series = [one for one in series if one.points]
    left, right, bottom = 62.0, 14.0, 42.0
    legend, top = _legend([one.name for one in series], width, LINES)
    top += 18 + (16 if marks else 0)
    height = 300.0 + top
    across, up = ([point[at] for one in series for point in one.points] for at in (0, 1))
    sx = Scale(*padded_domain(across, log=x.log, pad=0.03), left, width - right, x.log)
    low, high = padded_domain(up, log=y.log, pad=0.08)
    sy = Scale(low if y.log else 0.0, high, height - bottom, top, y.log)
    parts: list[Any] = [
        legend,
        text(4, top - (24 if marks else 8), y.name + (" (log scale)" if y.log else ""), "tick"),
        y_axis(sy, left, width - right, unit=y.unit),
        _ticks(sx, x.at, height - bottom)
        if x.at
        else x_axis(sx, height - bottom, unit=x.unit, count=6 if width > 600 else 3),
        text(width - right, height - 6, x.name + (" (log scale)" if x.log else ""), "tick", "end"),
    ]
    ends = 0.0
    for place, name in marks:
        if sx.low < place < sx.high:
            at = sx(place)
            parts.append(line(at, top, at, height - bottom, "leader"))
            if at - text_width(name, 11.5) / 2 > ends:
                parts.append(text(at, top - 5, name, "tick", "middle"))
                ends = at + text_width(name, 11.5) / 2 + 6
    for number, one in enumerate(series):
        places = [(sx(a), sy(b)) for a, b in one.points]
        if len(places) > 1:
            parts.append(path(places, LINES[number % len(LINES)]))
        for (px, py), (a, b) in zip(places, one.points, strict=True):
            said = f"{one.name}, {x.words(a)}: {y.words(b)}"
            parts.append(group(said, dot(px, py, 3.5, DOTS[number % len(DOTS)])))
    return drawing(width, height, label, *parts)


def roofline(roofs: Sequence[Roof], points: Sequence[Point], width: float) -> Markup:
    """Roofs as lines, measured operations as dots, a color a dtype."""
    left, right, bottom = 76.0, 14.0, 42.0
    names = [roof.dtype for roof in roofs]
    legend, top = _legend(names, width, LINES)
    top += 18
    height = 320.0 + top
    ridges = [roof.ridge for roof in roofs]
    across = [*(point.intensity for point in points), *ridges]
    low, high = padded_domain(across, log=True, pad=0.06)
    scale, unit = (1e12, "TFLOP/s") if max(roof.peak_flops_per_s for roof in roofs) >= 1e13 else (1e9, "GFLOP/s")
    up = [
        *(point.flops_per_s for point in points),
        *(roof.at(low) for roof in roofs),
        *(roof.peak_flops_per_s for roof in roofs),
    ]
    sx = Scale(low, high, left, width - right, True)
    sy = Scale(*padded_domain([one / scale for one in up], log=True, pad=0.05), height - bottom, top, True)
    parts: list[Any] = [
        legend,
        text(4, top - 8, f"{unit} (log scale)", "tick"),
        y_axis(sy, left, width - right),
        x_axis(sx, height - bottom, count=6 if width > 600 else 3),
        text(width - right, height - 6, "FLOPs a byte (log scale)", "tick", "end"),
    ]
    for number, roof in enumerate(roofs):
        corner = [(low, roof.at(low))] + [(roof.ridge, roof.peak_flops_per_s)] * (low < roof.ridge < high)
        places = [(sx(a), sy(b / scale)) for a, b in [*corner, (high, roof.at(high))]]
        parts.append(path(places, LINES[number % len(LINES)]))
    for point in points:
        said = (
            f"{point.dtype} {point.name}: {units.three(point.intensity)} FLOPs a byte, "
            f"{units.three(point.flops_per_s / scale)} {unit}, {point.share:.0%} of the roof"
        )
        kind = DOTS[names.index(point.dtype) % len(DOTS)]
        parts.append(group(said, dot(sx(point.intensity), sy(point.flops_per_s / scale), 4, kind)))
    said = f"Roofline of {len(points)} measured operations; ridges at " + ", ".join(
        f"{units.three(roof.ridge)} FLOPs a byte ({roof.dtype})" for roof in roofs
    )
    return drawing(width, height, said, *parts)


def _ticks(scale: Scale, at: Sequence[float], bottom: float) -> Markup:
    """Values under `bottom` at the places `at`."""
    return Markup("").join(
        line(scale(tick), bottom, scale(tick), bottom + 4, "grid")
        + text(scale(tick), bottom + 17, f"{tick:g}", "tick", "middle")
        for tick in at
    )


def _legend(names: Sequence[str], width: float, classes: Sequence[str]) -> tuple[Markup, float]:
    """Names with a piece of their line, in as many rows as the width needs; and where they end."""
    x, y, parts = 4.0, 10.0, []
    for number, name in enumerate(names):
        wide = 28 + text_width(name, 12) + 14
        if x + wide > width and x > 4:
            x, y = 4.0, y + 18
        parts.append(line(x, y - 4, x + 22, y - 4, classes[number % len(classes)]))
        parts.append(text(x + 28, y, name))
        x += wide
    return Markup("").join(parts), y + 6
