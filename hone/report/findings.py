"""The head of the page: up to four sentences, each computed from the figures of one section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from hone.report import arms, compare, units
from hone.report.collect import Line, Row, mappings

TOLERATED = 0.05
"""Loss of quality that a finding may have before another variant is preferred."""
SAME_SIZE = 1.01
"""Sizes with a ratio up to this are one size: headers of files differ by some bytes."""


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
    """The smallest variant of tolerable quality; of variants of one size the best. None where quality means nothing yet."""
    points, _ = compare.quality_points(line)
    base = next((point for point in points if point.model == compare.base_model(line)), None)
    whole = line.get(base.id) if base else None
    if (few := compare.not_learned(line)) is not None:
        text = f"{few.model} has a perplexity of {units.three(few.perplexity)} on held-out text, a bigram model of the same text"
        return Finding("barely trained", f"{text} {units.three(few.bigram)}: its quality means nothing yet", "quality")
    if base is None or whole is None:
        return None
    changes = {
        point.id: change
        for point in points
        if point.num_bytes < base.num_bytes * 0.99
        and (row := line.get(point.id)) is not None
        and (model := line.get(point.model)) is not None
        and model.kind == "compress"
        and (change := compare.perplexity_change(line, row, whole)) is not None
    }
    smaller = [point for point in points if point.id in changes]
    if not smaller:
        return None
    good = [point for point in smaller if changes[point.id].by <= TOLERATED]
    least = min((point.num_bytes for point in good), default=0.0)
    of_size = [point for point in good if point.num_bytes <= least * SAME_SIZE]
    best = min(of_size or smaller, key=lambda point: (point.quality, point.num_bytes))
    row = line.get(best.model)
    words = compare.technique_words(line.own_techniques(row)) if row else ""
    named = f"{best.label} ({words})" if words else best.label
    change = changes[best.id].words
    metric = units.label(compare.text_metric(line))
    price = f"no {metric} lost that this text shows" if change == "none" else f"{change} {metric}"
    if compare.quality_metric(line) == "kl_to_reference":
        price += f", KL {units.three(best.quality)} nats/token"
    factor = units.three(base.num_bytes / best.num_bytes)
    bits = compare.stored_bits(line, base.model)
    stored = f" stored in {bits:.3g} bits a weight" if bits else ""
    return Finding(f"{factor}x smaller", f"{named} against {base.label}{stored}: {price}", "quality")


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
        text = f"of {units.show_bytes(read)} of text"
        losses = [(before - after, step) for step, before, after in step_bytes(row) if before > after]
        if losses:
            lost, step = max(losses)
            text += f"; step '{step}' dropped the most, {units.show_bytes(lost)}"
        return Finding(f"{units.three(100 * kept / read)} % kept", text, "data")
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
    if row is None or compare.not_learned(line) is not None:
        return None
    size = f"{units.show(row.value('num_params'))} parameters, " if row.value("num_params") else ""
    return Finding(
        f"{units.three(row.value('val_bits_per_byte') or 0)} bits/byte",
        f"on validation text: {row.id}, {size}trained in {units.seconds(row.value('time_s') or 0)}",
        "loss",
    )


def _estimates(line: Line) -> Finding | None:
    """How many predicted times were right. Bytes and counts follow from the plan, so that their estimates prove nothing."""
    known = [
        check for check in compare.checks(line) if check.figure.name == "time_s" and check.ratio and not check.bound
    ]
    if len(known) < 3:
        return None
    close = sum(compare.near(check.ratio or 0.0) for check in known)
    text = f"predicted within {100 * compare.CLOSE:.0f} % of what was measured (sizes follow from the plan and are not counted)"
    worst = max(known, key=lambda check: max(check.ratio or 1.0, 1 / (check.ratio or 1.0)))
    if not compare.near(worst.ratio or 0.0):
        text += f"; furthest off: {worst.row.id}, predicted {compare.error_words(worst)} the time it took"
    return Finding(f"{close} of {len(known)} times", text, "estimates")
