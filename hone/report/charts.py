"""Curves, points and maps: the loss of a training run, how busy its experts are, and quality against size; one static SVG each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from hone.report import units
from hone.report.collect import Row, finite, mappings, sound
from hone.report.compare import Point, pareto
from hone.report.svg import (
    Scale,
    dot,
    drawing,
    el,
    fit,
    group,
    line,
    padded_domain,
    path,
    place_labels,
    text,
    x_axis,
    y_axis,
)


def loss_series(row: Row) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(step, training loss) and (step, validation loss) of a train artifact, from its steps.jsonl."""
    steps = row.content.get("steps.jsonl") or []
    train = finite((entry.get("step"), entry.get("loss")) for entry in steps)
    val = finite((entry.get("step"), entry.get("val_loss")) for entry in steps)
    return sorted(train), sorted(val)


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Centered running mean over `window` points, narrower at both ends."""
    half = window // 2
    return [
        (x, sum(y for _, y in part) / len(part))
        for index, (x, _) in enumerate(points)
        if (part := points[max(0, index - half) : index + half + 1])
    ]


def thin(points: list[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """About `most` of the points at most, evenly spaced, including the last."""
    stride = max(1, math.ceil(len(points) / most))
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def loss(row: Row, width: float, domain: tuple[float, float] | None, *, apart: bool = False) -> Markup:
    """Training loss (faint: every step; dark: running mean) and validation loss (dots) over steps.

    With `apart` the training loss is another quantity, as a student's distance from its teacher: it is drawn below, on its
    own axis, and `domain` is that of the validation loss.
    """
    train, val = loss_series(row)
    left, right, top, bottom = 44.0, 16.0, 14.0, 34.0
    xs = [x for x, _ in train + val]
    x = Scale(min(xs), max(max(xs), min(xs) + 1), left, width - right)
    curve = smooth(train, max(3, len(train) // 25))
    split = apart and bool(train) and bool(val)
    height = 300.0 if split else 260.0
    middle = (height - top - bottom) / 2 + top
    bands = [(top, middle - 14), (middle + 14, height - bottom)] if split else [(top, height - bottom)]
    groups: list[tuple[list, list, tuple[float, float] | None]] = [(train, val, domain)]
    if split:
        groups = [([], val, domain), (train, [], None)]
    parts: list[Any] = [x_axis(x, height - bottom), text(width - right, height - 4, "step", "tick", "end")]
    for (first, last), (steps, dots, given) in zip(bands, groups, strict=True):
        low, high = given or padded_domain([value for _, value in steps + dots], log=False, pad=0.04)
        y = Scale(low, high, last, first)
        parts.append(y_axis(y, left, width - right, count=3 if split else 7))

        def at(points: list[tuple[float, float]], y: Scale = y) -> list[tuple[float, float]]:
            return [(x(a), y(min(max(b, y.low), y.high))) for a, b in points]

        if steps:
            parts += [path(at(thin(steps)), "raw"), path(at(thin(curve)), "curve")]
        if dots:
            parts.append(path(at(dots), "val"))
            for (px, py), (step, value) in zip(at(dots), dots, strict=True):
                said = f"step {step:.0f}: validation loss {value!r} nats/token"
                parts.append(group(said, dot(px, py, 3.5, "valdot")))
        ends = [("validation", dots, "vallabel")] if dots else []
        ends += [("teacher's loss, training" if split else "training", curve, "curvelabel")] if steps else []
        words = [f"{name} {units.three(series[-1][1])}" for name, series, _ in ends]
        places = at([series[-1] for _, series, _ in ends])
        parts += _end_labels(words, [class_ for *_, class_ in ends], places, width - right, first)
    said = f"Loss of {row.id} over {len(train)} steps" + (
        f", validation loss from {units.three(val[0][1])} to {units.three(val[-1][1])} nats per token" if val else ""
    )
    return drawing(width, height, said, *parts)


def _end_labels(
    words: list[str], classes: list[str], ends: list[tuple[float, float]], right: float, top: float
) -> list[Markup]:
    """Series names, right-aligned above the ends of the curves (which fall, so there is space), the higher curve first."""
    order = sorted(range(len(words)), key=lambda index: ends[index][1])
    base = max(top + 12 + 16 * (len(words) - 1), min((y for _, y in ends), default=top) - 46)
    return [
        text(right, base - 16 * (len(words) - 1 - place), words[index], classes[index], "end")
        for place, index in enumerate(order)
    ]


def loss_domain(rows: Sequence[Row], val_alone: bool = False) -> tuple[float, float] | None:
    """A common loss axis for these training runs, with `val_alone` for their validation losses where there are any."""
    values = [loss_ for row in rows for _, loss_ in loss_series(row)[1]] if val_alone else []
    values = values or [loss_ for row in rows for series in loss_series(row) for _, loss_ in series]
    if not values:
        return None
    low, high = padded_domain(values, log=False, pad=0.04)
    return max(low, 0.0) if min(values) >= 0 else low, high


def quality(points: Sequence[Point], width: float, metric: str, unit: str) -> Markup:
    """Each model as a point, size against quality (both: less is better), with the Pareto line and known intervals.

    The reference of a divergence, whose own is 0, is drawn at the bottom of a logarithmic axis.
    """
    height, left, right, top, bottom = 340.0 if width > 600 else 320.0, 52.0, 18.0, 22.0, 44.0
    sizes, values = [point.num_bytes for point in points], [point.quality for point in points]
    to_reference = metric == "kl_to_reference" and min(values) == 0 and max(values) > 0
    if to_reference:
        values = [value or min(value for value in values if value) / 3 for value in values]
    log_x, log_y = max(sizes) / min(sizes) > 3, min(values) > 0 and (max(values) / min(values) > 3 or to_reference)
    x = Scale(*padded_domain(sizes, log=log_x, pad=0.13), left, width - right, log_x)
    y = Scale(*padded_domain(values, log=log_y, pad=0.17, least=0.02), height - bottom, top, log_y)
    parts: list[Any] = [
        y_axis(y, left, width - right),
        x_axis(x, height - bottom, unit="B", count=5 if width > 600 else 3, top=top),
    ]
    parts.append(text(width - right, height - 6, "model size" + (" (log scale)" if log_x else ""), "tick", "end"))
    heading = "KL to the uncompressed model, nats/token" if metric == "kl_to_reference" else units.label(metric)
    heading = heading if width > 600 or metric != "kl_to_reference" else "KL, nats/token"
    parts.append(text(4, 11, f"{heading}{' (log scale)' if log_y else ''}, lower is better", "tick"))
    for point, value in zip(points, values, strict=True):
        if point.half and point.quality:
            low, high = (max(value + way * point.half, y.low) for way in (-1, 1))
            parts.append(line(x(point.num_bytes), y(low), x(point.num_bytes), y(min(high, y.high)), "whisker"))
    front = [(x(sizes[i]), y(values[i])) for i in pareto(list(zip(sizes, values, strict=True)))]
    steps = [front[0]]
    for px, py in front[1:]:
        steps += [(px, steps[-1][1]), (px, py)]
    steps = [(steps[0][0], top), *steps, (width - right, steps[-1][1])]
    parts.append(path(steps, "pareto"))
    walls = [(min(a, c) - 1, min(b, d) - 1, max(a, c) + 1, max(b, d) + 1) for (a, b), (c, d) in pairwise(steps)]
    anchors = [(x(size), y(value)) for size, value in zip(sizes, values, strict=True)]
    order = sorted(range(len(points)), key=lambda index: (not points[index].on_line, anchors[index]))
    labels = [
        points[index].label + (" (itself)" if to_reference and not points[index].quality else "") for index in order
    ]
    frame = (left, top - 8, width - 2, height - bottom)
    placed = place_labels([anchors[index] for index in order], labels, frame, size=13, obstacles=walls)
    boxes = dict(zip(order, zip(placed, labels, strict=True), strict=True))
    for index in reversed(order):
        point = points[index]
        (px, py), (box, label) = anchors[index], boxes[index]
        said = f"{point.label}: {units.exact(point.num_bytes, 'B')}, {units.label(metric)} {units.exact(point.quality, unit)}"
        far = max(abs((box[0] + box[2]) / 2 - px) - (box[2] - box[0]) / 2, abs((box[1] + box[3]) / 2 - py) - 8) > 14
        leader = line(px, py, min(max(px, box[0]), box[2]), (box[1] + box[3]) / 2, "leader") if far else None
        kind = "best" if point.on_line else "other"
        parts.append(
            group(
                said,
                leader,
                dot(px, py, 6, f"point {kind}"),
                text(box[0], box[3] - 4, label, f"pointlabel {kind}"),
            )
        )
    best = ", ".join(point.label for point in points if point.on_line)
    return drawing(
        width,
        height,
        f"{units.label(metric)} against model size of {len(points)} models; on the Pareto line: {best}",
        *parts,
    )


def expert_loads(row: Row) -> dict[str, list[float]]:
    """Tokens of each expert by layer, summed over the last tenth of the steps that logged them; {} where none did."""
    found = [entry["expert_loads"] for entry in mappings(row.content.get("steps.jsonl")) if "expert_loads" in entry]
    found = [one for one in found if isinstance(one, dict)]
    last = found[-max(1, len(found) // 10) :]
    summed: dict[str, list[float]] = {}
    for layer in last[-1] if last else ():
        rows = [one.get(layer) for one in last]
        good = [one for one in rows if isinstance(one, list) and one and all(map(sound, one))]
        good = [one for one in good if len(one) == len(good[-1])]
        if good and sum(map(sum, good)) > 0:
            summed[str(layer)] = [float(sum(column)) for column in zip(*good, strict=True)]
    return summed


def busiest(loads: Sequence[float]) -> float:
    """The largest of the loads of a layer's experts / their mean."""
    return max(loads) * len(loads) / sum(loads)


def experts(row: Row, width: float) -> Markup:
    """How busy each expert of each layer was at the end: a line a layer, a square an expert, the darker the farther from the mean."""
    loads, left, height = expert_loads(row), 64.0, 18.0
    wide = (width - left - 48) / max(map(len, loads.values()), default=1)
    drawn = []
    for place, (layer, counts) in enumerate(loads.items()):
        top, mean = 4 + place * (height + 2), sum(counts) / len(counts)
        drawn.append(text(left - 8, top + 13, fit(f"layer {layer}", left - 10), "tick", anchor="end"))
        for expert, count in enumerate(counts):
            share = count / mean
            color, depth = ("heat more", share - 1) if share >= 1 else ("heat less", 1 - share)
            shown = min(0.08 + 0.92 * depth, 1.0)
            square = el(
                "rect", x=left + expert * wide, y=top, width=max(wide - 1, 0.5), height=height, class_=color, fill_opacity=f"{shown:.2f}",
            )  # fmt: skip
            drawn.append(group(f"layer {layer}, expert {expert}: {share:.2f} x the mean", square))
        drawn.append(text(width, top + 13, f"{busiest(counts):.2f} x", "tick", anchor="end"))
    return drawing(width, 4 + len(loads) * (height + 2), f"how busy the experts of {row.id} are", *drawn)


def experts_words(row: Row) -> str:
    """The figures of the last step that has them."""
    entries = [entry for entry in mappings(row.content.get("steps.jsonl")) if sound(entry.get("expert_load"))]
    if not entries:
        return ""
    first, last = entries[0], entries[-1]
    words = [
        f"busiest expert {last['expert_load']:.2f} x the mean of its layer in the last step, {first['expert_load']:.2f} x in the first"
    ]
    if sound(last.get("expert_drops")):
        words.append(f"{last['expert_drops']:.1%} of visits dropped")
    if sound(last.get("router_entropy")):
        words.append(f"entropy of the router {last['router_entropy']:.2f} nats")
    return ", ".join(words)
