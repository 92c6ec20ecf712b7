"""The head of the page: up to four sentences, each computed from the figures of one section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from hone.report import arms, compare, units
from hone.report.collect import Line, Row, mappings

TOLERATED = 0.05
"""Loss of quality that a finding may have before another variant is preferred."""
CLOSE = 0.2
"""Relative error up to which the head of the page counts an estimate as accurate."""


@dataclass(frozen=True)
class Finding:
    """One sentence for the head of the page: `value` in large type, `text` below it, `about` the section it comes from."""

    value: str
    text: str
    about: str


def findings(line: Line) -> list[Finding]:
    """Up to four sentences for the head of the page, each computed from the figures of one section."""
    found = [_effect(line), _compression(line), _serving(line), _data(line), _estimates(line), _training(line)]
    return [finding for finding in found if finding is not None][:4]


def _effect(line: Line) -> Finding | None:
    """The clearest effect of an arm over seeds; without a clear one, the first comparison."""
    found = [
        (trial, trial.figures[0], effect)
        for trial in arms.trials(line)
        if trial.kind != "serve"
        for effect in trial.effects(trial.figures[0])
        if effect.difference is not None
    ]
    if not found:
        return None

    def strength(entry: tuple[arms.Trial, str, arms.Effect]) -> float:
        by, half, _ = entry[2].difference or (0.0, 0.0, 0.0)
        return abs(by) / half if half else math.inf if by else 0.0

    trial, name, effect = max(found, key=strength) if any(e.difference.clear for *_, e in found) else found[0]
    difference = effect.difference
    assert difference is not None, "entries without one were left out above"
    base = trial.arms[0]
    seeds = f"{len(effect.values)} seeds" if len(effect.values) == len(base.values(name)) else "these seeds"
    half = units.fixed(difference.half, units.decimals(difference.half))
    by = f"{units.fixed(difference.by, units.decimals(difference.half), signed=True)} ± {half}"
    change = units.signed_percent(difference.by / abs(base_mean)) if (base_mean := fmean(base.values(name))) else by
    value = change if difference.clear else "no clear effect"
    text = f"{effect.arm.label} against {base.short}: {units.label(name)} {by}"
    return Finding(value, f"{text}{f' {unit}' if (unit := _unit(effect, name)) else ''}, {seeds}", "effect")


def _unit(effect: arms.Effect, name: str) -> str:
    return effect.arm.rows[0].figures[name].unit if name in effect.arm.rows[0].figures else ""


def _compression(line: Line) -> Finding | None:
    points, _ = compare.quality_points(line)
    base = next((point for point in points if point.model == compare.base_model(line)), None)
    if base is None or not base.quality:
        return None
    smaller = [
        point
        for point in points
        if point.num_bytes < base.num_bytes * 0.99 and (row := line.get(point.model)) and row.kind == "compress"
    ]
    if not smaller:
        return None
    good = [point for point in smaller if point.quality <= base.quality * (1 + TOLERATED)]
    by_size = sorted(good, key=lambda point: (point.num_bytes, point.quality))
    best = by_size[0] if good else min(smaller, key=lambda point: point.quality)
    row = line.get(best.model)
    words = compare.technique_words(line.own_techniques(row)) if row else ""
    change = best.quality / base.quality - 1
    metric = units.label(compare.quality_metric(line))
    named = f"{best.label} ({words})" if words else best.label
    price = f"for {units.signed_percent(change)} {metric}" if abs(change) >= 0.0005 else f"at the same {metric}"
    factor = units.three(base.num_bytes / best.num_bytes)
    bits = compare.stored_bits(line, base.model)
    stored = f" stored in {bits:.3g} bits a weight" if bits else ""
    return Finding(f"{factor}x smaller", f"{named} against {base.label}{stored}, {price}", "quality")


def _serving(line: Line) -> Finding | None:
    """The largest clear difference in tokens/s between serving runs; without one, the rate of the first runs."""
    found: list[tuple[float, str]] = []
    for trial in arms.trials(line):
        if trial.kind != "serve":
            continue
        base = trial.arms[0]
        for effect in trial.effects("tokens_per_s"):
            if effect.difference is None or not effect.difference.clear:
                continue
            ratio = effect.mean / fmean(base.values("tokens_per_s"))
            change = effect.arm.change_from(base)
            if ratio >= 1:
                found.append((ratio, f"serving {effect.arm.name} ({change}) instead of {base.name}"))
            elif "model" not in dict(effect.arm.fields) or base.model == effect.arm.model:
                # A slower variant is no finding against it: it was made to be smaller.
                found.append((1 / ratio, f"serving {base.name} instead of {effect.arm.name} ({change})"))
    if found:
        ratio, words = max(found)
        return Finding(f"{units.three(ratio)}x tokens/s", words, "serving")
    rated = [arm for arm in arms.serving(line) if arm.values("tokens_per_s")]
    if not rated:
        return None
    values = rated[0].values("tokens_per_s")
    runs = f", mean of {len(values)} runs" if len(values) > 1 else ""
    return Finding(units.show(fmean(values), "tokens/s"), f"generated by {rated[0].name}{runs}", "serving")


def _data(line: Line) -> Finding | None:
    for row in line.of("data"):
        read, kept = row.value("input_bytes"), row.value("kept_bytes")
        if not read or kept is None:
            continue
        text = f"of {units.show_bytes(read)} of text kept"
        losses = [(before - after, step) for step, before, after in step_bytes(row) if before > after]
        if losses:
            lost, step = max(losses)
            text += f"; step '{step}' dropped the most, {units.show_bytes(lost)}"
        return Finding(f"{units.three(100 * kept / read)} %", text, "data")
    return None


def step_bytes(row: Row) -> list[tuple[str, float, float]]:
    """(step, bytes in, bytes out) of a data artifact's steps, from its stats.json."""
    steps = mappings((row.content.get("stats.json") or {}).get("steps"))
    return [
        (str(step.get("name", "?")), float(step["bytes_in"]), float(step["bytes_out"]))
        for step in steps
        if isinstance(step.get("bytes_in"), int | float) and isinstance(step.get("bytes_out"), int | float)
    ]


def _training(line: Line) -> Finding | None:
    row = next(
        (row for row in line.of("train") if row.value("val_bits_per_byte") is not None and row.value("time_s")), None
    )
    if row is None:
        return None
    size = f"{units.show(row.value('num_params'))} parameters, " if row.value("num_params") else ""
    return Finding(
        f"{units.three(row.value('val_bits_per_byte') or 0)} bits/byte",
        f"on validation text: {row.id}, {size}trained in {units.seconds(row.value('time_s') or 0)}",
        "loss",
    )


def _estimates(line: Line) -> Finding | None:
    known = [
        (max(check.ratio, 1 / check.ratio), check) for check in compare.checks(line) if check.ratio and not check.bound
    ]
    if len(known) < 3:
        return None
    close = sum(abs((check.ratio or 0) - 1) <= CLOSE for _, check in known)
    text = f"estimates came within {100 * CLOSE:.0f} % of what was then measured"
    factor, worst = max(known, key=lambda row: row[0])
    if factor > 1 + CLOSE:
        text += f"; furthest off: {worst.row.id}, {units.label(worst.figure.name)}, {compare.error_words(worst)}"
    return Finding(f"{close} of {len(known)}", text, "estimates")
