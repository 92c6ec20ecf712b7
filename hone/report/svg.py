"""SVG elements, scales, ticks and text widths; every text is escaped, every color is a class of chart.css.

Charts are written here and not by a plotting library, because of what the page must be: one file that opens offline, without a
script it needs; colors that follow the reader's light or dark setting, which only classes in the page's own style sheet do; a
tooltip with the exact value on every mark, links, and a text alternative; the same bytes for the same artifacts; and a report
that needs no package but the templates'. Figures of matplotlib have colors and sizes fixed when drawn and text as outlines or in
fonts the reader may lack; those of altair or plotly need megabytes of JavaScript. What is left to do by hand is here: round
ticks, the estimated width of a label, and where labels of points go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from hone.report import units

_NARROW = set("iljtfrI.,:;|'!()[] -/")
_WIDE = set("mwMWQO@%")


def el(name: str, *children: Any, **attributes: Any) -> Markup:
    """Element `name`; children that are not Markup are escaped; `class_` -> class, `stroke_width` -> stroke-width."""
    shown = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _number(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(child) for child in children if child is not None)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), shown, inner)


def _number(value: Any) -> Any:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def drawing(width: float, height: float, label: str, *children: Any, role: str = "img") -> Markup:
    """A whole SVG with a text alternative, as wide as its container up to its own width; role 'group' if it has links."""
    return Markup(
        '<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="{4}" aria-label="{2}" xmlns="http://www.w3.org/2000/svg">{3}</svg>'
    ).format(round(width), round(height), label, Markup("").join(escape(child) for child in children), role)


def text(x: float, y: float, content: Any, class_: str = "", anchor: str | None = None, **more: Any) -> Markup:
    return el("text", content, x=float(x), y=float(y), class_=class_ or None, text_anchor=anchor, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return el("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, rx: float = 2) -> Markup:
    return el("rect", x=float(x), y=float(y), width=float(max(width, 0)), height=float(height), rx=rx, class_=class_)


def dot(x: float, y: float, radius: float, class_: str) -> Markup:
    return el("circle", cx=float(x), cy=float(y), r=radius, class_=class_)


def path(points: list[tuple[float, float]], class_: str) -> Markup:
    return el("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), class_=class_)


def group(title: str, *children: Any, **attributes: Any) -> Markup:
    """Children with a tooltip."""
    return el("g", el("title", title), *children, **attributes)


def text_width(content: str, size: float = 12) -> float:
    """An upper estimate of the width of `content` in a proportional system font."""
    units_wide = sum(0.34 if c in _NARROW else 0.9 if c in _WIDE else 0.7 if c.isupper() else 0.57 for c in content)
    return units_wide * size * 1.03


def fit(content: str, width: float, size: float = 12) -> str:
    """`content`, cut with an ellipsis if wider than `width`."""
    if text_width(content, size) <= width:
        return content
    while content and text_width(content + "…", size) > width:
        content = content[:-1]
    return content.rstrip() + "…"


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels [start, end], linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5, unit: str = "") -> list[float]:
        """About `count` round values inside the domain; binary-round for bytes."""
        if self.log and self.high / self.low > 3:
            found = _log_ticks(self.low, self.high, unit)
            while len(found) > count + 2:
                found = found[::2]
            return found
        whole = 1024.0 ** max(0, math.floor(math.log(abs(self.high) or 1, 1024))) if unit == "B" else 1.0
        size = decimal_step((self.high - self.low) / max(count, 1) / whole) * whole
        first = math.ceil(self.low / size - 1e-9)
        last = math.floor(self.high / size + 1e-9)
        return [index * size for index in range(first, last + 1)]


def decimal_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999), 10 * power)


def _log_ticks(low: float, high: float, unit: str) -> list[float]:
    if unit == "B":
        powers = [2.0**exponent for exponent in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
        return [value for value in powers if low <= value <= high]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found
    return found


def padded_domain(values: list[float], *, log: bool, pad: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """A domain around `values` with space on both sides, also for a single value.

    `least` is the least relative span, so that nearly equal values do not fill the axis.
    """
    low, high = min(values), max(values)
    if high > low and high - low < least * abs(high):
        middle = (low + high) / 2
        low, high = middle - least * abs(high) / 2, middle + least * abs(high) / 2
    if log:
        room = (high / low) ** pad if high > low else 1.5
        return low / room, high * room
    room = (high - low) * pad if high > low else abs(high) * 0.2 or 1.0
    return low - room, high + room


def y_axis(scale: Scale, left: float, right: float, *, unit: str = "", count: int = 7) -> Markup:
    """Grid lines with their values at the left."""
    found = scale.ticks(count, unit)
    return Markup("").join(
        line(left, scale(tick), right, scale(tick), "grid") + text(left - 6, scale(tick) + 3.5, words, "tick", "end")
        for tick, words in zip(found, units.ticks(found, unit), strict=True)
    )


def x_axis(scale: Scale, bottom: float, *, unit: str = "", count: int = 5, top: float | None = None) -> Markup:
    """Values under `bottom`, with grid lines up to `top` when given."""
    found = scale.ticks(count, unit)
    return Markup("").join(
        line(scale(tick), top if top is not None else bottom, scale(tick), bottom + 4, "grid")
        + text(scale(tick), bottom + 17, words, "tick", "middle")
        for tick, words in zip(found, units.ticks(found, unit), strict=True)
    )


Box = tuple[float, float, float, float]
"""x0, y0, x1, y1."""


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def distance(box: Box, x: float, y: float) -> float:
    """Distance from a point to the nearest edge of `box`; 0 inside it."""
    return math.hypot(max(box[0] - x, 0, x - box[2]), max(box[1] - y, 0, y - box[3]))


def place_labels(
    anchors: list[tuple[float, float]],
    labels: list[str],
    frame: Box,
    *,
    size: float = 12,
    radius: float = 6,
    obstacles: Sequence[Box] = (),
) -> list[Box]:
    """A box for each label, nearer to its own anchor than to any other, inside `frame`, overlapping no other label, no point and no obstacle.

    Tries the nearest positions first, then further rings around the point. If there is no space, it drops these conditions in
    order: nearest to its own anchor, no overlap with points and obstacles, no overlap with other labels.
    """
    points = [(x - radius, y - radius, x + radius, y + radius) for x, y in anchors]
    placed: list[Box] = []
    for (x, y), label in zip(anchors, labels, strict=True):
        places = _places(x, y, text_width(label, size), size * 1.25, radius)
        taken = [*placed, *points, *obstacles]
        inside = [p for p in places if p[0] >= frame[0] and p[1] >= frame[1] and p[2] <= frame[2] and p[3] <= frame[3]]
        free = [place for place in inside if not any(overlap(place, other) for other in taken)]
        others = [anchor for anchor in anchors if anchor != (x, y)]
        clear = [p for p in free if all(distance(p, x, y) < 0.8 * distance(p, *other) for other in others)]
        apart = [place for place in inside if not any(overlap(place, other) for other in placed)]
        placed.append((clear or free or apart or inside or places)[0])
    return placed


def _places(x: float, y: float, width: float, height: float, radius: float) -> list[Box]:
    places = []
    for ring in range(12):
        gap = radius + 3 + ring * height * 0.6
        for left, top in (
            (x + gap, y - height / 2),
            (x - width / 2, y - gap - height),
            (x - width / 2, y + gap),
            (x - gap - width, y - height / 2),
            (x + gap * 0.7, y - gap * 0.7 - height),
            (x + gap * 0.7, y + gap * 0.7),
            (x - gap * 0.7 - width, y - gap * 0.7 - height),
            (x - gap * 0.7 - width, y + gap * 0.7),
        ):
            places.append((left, top, left + width, top + height))
    return places
