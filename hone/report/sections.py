"""The contents of the page's sections: tables, sentences and charts, computed from the collected rows."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from hone.report import arms, bars, charts, compare, units
from hone.report.collect import Line, Row, finite, sound

FULL, HALF, PHONE = 1098.0, 516.0, 326.0
"""Chart widths in pixels: the full width of the page, half of it, a phone."""
EXACT = 0.02
"""Relative error up to which an estimate follows from the plan, as the size of a folder does, and proves nothing."""
SERVING = (
    "tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "prefix_hit_rate",
    "acceptance_rate",
    "kv_cache_bytes",
    "joules_per_token",
)
TRAINED = {
    "num_params": "{} parameters",
    "train_tokens": "{} training tokens",
    "val_loss": "validation loss {}",
    "val_bits_per_byte": "{}",
    "time_s": "in {}",
}


def both(draw: Callable[[float], Markup], wide: float = HALF) -> Markup:
    """A chart drawn twice, for a wide and for a narrow screen; the style sheet shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(PHONE))


def losses(line: Line) -> list[tuple[Row, Markup, str]]:
    """(row, chart, sentence) of every training run with a steps.jsonl. A student's own loss has an axis of its own."""
    rows = [row for row in line.of("train") if any(charts.loss_series(row))]
    domains = {told: charts.loss_domain([row for row in rows if taught(row) == told], told) for told in (False, True)}
    wide = HALF if len(rows) > 1 else FULL
    found = []
    for row in rows:
        words, domain = [], domains[taught(row)]
        for name, said in TRAINED.items():
            if row.value(name) is not None:
                unit = "" if name in ("num_params", "train_tokens") else row.figures[name].unit
                words.append(said.format(units.show(row.value(name), unit, name)))
        if row.value("num_steps") is not None and row.figures["num_steps"].note:
            words.append(f"{row.value('num_steps'):.0f} steps {row.figures['num_steps'].note}")

        def draw(width: float, row: Row = row, domain: Any = domain) -> Markup:
            return charts.loss(row, width, domain, apart=taught(row))

        found.append((row, both(draw, wide), ", ".join(words)))
    return found


def schedules(line: Line) -> list[tuple[Row, Markup, str]]:
    """(row, drawing, sentence) of every training with pipeline stages: its schedule as it was planned, from log/pipeline.json."""
    found = []
    for row in line.of("train"):
        plan = row.content.get("log/pipeline.json")
        if not (ranks := _ranks(plan)):
            continue
        seconds, bubble = (value if sound(value := plan.get(name)) else None for name in ("seconds", "bubble"))
        said = f"{plan.get('schedule')}: {units.show(seconds, 's')} of passes in a step as planned, "
        said += f"{units.show(bubble, 'fraction')} of the ranks' time is waiting. A line is a rank; numbers are micro-batches."

        def draw(width: float, ranks: Any = ranks, name: str = str(plan.get("schedule"))) -> Markup:
            return bars.passes(ranks, name, width)

        found.append((row, both(draw, FULL), said))
    return found


def _ranks(plan: Any) -> list[list[bars.Pass]]:
    """The passes of each rank of a planned schedule, [] where one cannot be drawn; a rank without passes keeps its line."""
    ranks = plan.get("ranks") if isinstance(plan, dict) else None
    found: list[list[bars.Pass]] = []
    for rank in ranks if isinstance(ranks, list) else []:
        row = [_pass(one) for one in rank] if isinstance(rank, list) else [None]
        if None in row:
            return []
        found.append([one for one in row if one is not None])
    return found if any(one.end > 0 for row in found for one in row) else []


def _pass(fields: Any) -> bars.Pass | None:
    """The pass with these fields; None where they are not one."""
    if not isinstance(fields, list) or len(fields) != len(bars.Pass._fields):
        return None
    found = bars.Pass(*fields)
    timed = sound(found.begin) and sound(found.end) and 0 <= found.begin <= found.end
    return found if timed and isinstance(found.kind, str) else None


def taught(row: Row) -> bool:
    """Whether a training run had a teacher: its training loss is then another quantity."""
    return row.parent("teacher") is not None


def effects(line: Line) -> list[dict[str, Any]]:
    """Every trial of arms over seeds except serving runs: its chart, its table, and the tables of its other figures."""
    return [_effect(trial) for trial in arms.trials(line) if trial.kind != "serve"]


def _effect(trial: arms.Trial) -> dict[str, Any]:
    tables = [_effect_table(trial, name) for name in trial.figures]
    chart = _means(trial, tables[0]) if len(trial.arms) > 1 else None
    return {"trial": trial, "chart": chart, "main": tables[0], "others": tables[1:]}


def comparisons(found: list[dict[str, Any]]) -> int:
    """The number of differences with an interval in these trials."""
    tables = [table for entry in found for table in (entry["main"], *entry["others"])]
    return sum(bool(row["interval"]) for table in tables for row in table["rows"])


def _effect_table(trial: arms.Trial, name: str) -> dict[str, Any]:
    """One figure of a trial's arms as text of equal precision; fractions in percent."""
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
        rows.append(
            {
                "effect": effect,
                "label": _arm_label(trial, effect.arm),
                "n": len(effect.values),
                "mean": words(effect.mean),
                "stdev": words(effect.stdev),
                "difference": words(found.by, signed=True) if found is not None else "",
                "interval": " to ".join(ends),
                "verdict": effect.verdict,
                "tone": "good" if good > 0 else "bad" if good < 0 else "",
                "stem": (stem := arms.stem([row.id for row in effect.arm.rows])),
                "artifacts": [
                    (row.id, row.id.removeprefix(stem), units.exact(row.value(name), figure.unit))
                    for row in effect.arm.rows
                ],
            }
        )
    better = {1: "higher is better", -1: "lower is better", 0: ""}[arms.direction(name)]
    return {"name": name, "unit": unit, "rows": rows, "better": better, "note": figure.note}


def _arm_label(trial: arms.Trial, arm: arms.Arm) -> str:
    """The label of an arm in a table: the fields in which arms differ; for a serving arm its name and its changes."""
    if trial.kind != "serve":
        return arm.label
    return arm.name if arm is trial.arms[0] else f"{arm.name}: {arm.change_from(trial.arms[0])}"


def _means(trial: arms.Trial, table: dict[str, Any]) -> Markup:
    scale = 100.0 if table["unit"] == "%" else 1.0
    effects = [row["effect"] for row in table["rows"]]
    rows = [
        (
            effect.arm.name if trial.kind == "serve" else effect.arm.short,
            [value * scale for value in effect.values],
            effect.half and effect.half * scale,
        )
        for effect in effects
    ]
    said = f"{units.label(table['name'])} of {len(rows)} arms over their seeds, with 95 % intervals"
    return both(lambda width: bars.means(rows, width, [row["mean"] for row in table["rows"]], said), FULL)


def quality(line: Line) -> dict[str, Any] | None:
    """Chart and table of the evaluated models; None without a comparable evaluation."""
    points, left_out = compare.quality_points(line)
    if not points:
        return None
    metric, text = compare.quality_metric(line), compare.text_metric(line)
    base = next((point for point in points if point.model == compare.base_model(line)), None)
    whole = line.get(base.id) if base else None
    rows = []
    for point in sorted(points, key=lambda point: (-point.num_bytes, point.quality)):
        row = line.get(point.id)
        compared = base is not None and point is not base
        change = compare.perplexity_change(line, row, whole) if compared and row and whole else None
        rows.append(
            {
                "row": row,
                "label": point.label,
                "words": compare.lineage_words(line, point.model),
                "bytes": point.num_bytes,
                "bits": f"{bits:.3g}" if (bits := compare.stored_bits(line, point.model)) else "",
                "tokens": units.show(point.tokens, "") if point.tokens else "",
                "smaller": _smaller(base.num_bytes, point.num_bytes) if compared and base else "",
                "change": change,
                "kl": _with_interval(row, "kl_to_reference") if row else "",
            }
        )
    unit = compare.quality_unit(line)
    views = compare.quality_views(points)
    wide = HALF if len(views) > 1 else FULL
    return {
        "charts": [
            (title, both(lambda width, seen=seen: charts.quality(seen, width, metric, unit), wide))
            for title, seen in views
        ],
        "rows": rows,
        "metric": text,
        "by_kl": metric == "kl_to_reference",
        "few": compare.not_learned(line),
        "note": _quality_note(line, points, left_out),
        "layers": _layers(line),
    }


def _with_interval(row: Row, name: str) -> str:
    """A figure's value and half of its 95 % interval: '0.0093 ± 0.0011'."""
    value = row.value(name)
    if value is None:
        return ""
    half = row.figures[name].ci95
    if not half or not sound(half):
        return units.three(value)
    if abs(value) < 1e-4:
        return f"{units.three(value)} ± {units.three(half, 2)}"
    places = max(units.decimals(half) - 1, 0)  # two digits of the interval
    return f"{units.fixed(value, places)} ± {units.fixed(half, places)}"


def _quality_note(line: Line, points: list[compare.Point], left_out: list[Row]) -> str:
    """The conditions of the evaluations, and what is not compared."""
    text = compare.text_metric(line)
    rows = [row for row in line.of("eval") if row.id == points[0].id]
    note = f"{units.heading(text)}: {rows[0].figures[text].note}. " if rows[0].figures[text].note else ""
    if (bigram := rows[0].value("bigram_perplexity")) is not None:
        note += f"A bigram model of the training text has {units.three(bigram)} ({rows[0].figures['bigram_perplexity'].note}). "
    if any(row.figures["loss_over_reference"].ci95 for row in line.of("eval") if "loss_over_reference" in row.figures):
        note += "± is half of a 95 % interval over documents; a change is none where its interval contains 0. "
    trained = next((row.figures["val_loss"].note for row in line.of("train") if row.value("val_loss") is not None), "")
    if trained:
        note += f"The validation loss of a training run is another figure ({trained}): compare models by this table. "
    longer = [point.label for point in points if point.longer]
    if longer:
        note += (
            f"{', '.join(longer)}: trained on more tokens than the model of the line, so that a better figure may not come "
            "from its techniques; left out of the line. "
        )
    if left_out:
        note += f"Not comparable (other data, other window, or no figure) and left out: {', '.join(row.id for row in left_out)}."
    return note


def _smaller(before: float, after: float) -> str:
    return "same size" if abs(before / after - 1) < 0.005 else f"{units.three(before / after)}x"


def _layers(line: Line) -> list[tuple[str, Markup, str]]:
    """(title, chart, sentence) of the errors layer by layer: of outputs; of weights where no run had calibration text.

    A method that uses calibration text accepts larger weight errors for smaller output errors, so that weight errors of
    methods with and without it cannot be compared.
    """
    for key, title, words in (
        ("error", "Output error, layer by layer", "Relative error of each linear's output on the calibration text."),
        (
            "weight_error",
            "Weight error, layer by layer",
            "Relative error of the weights alone: no calibration text was given, so that output errors are not known.",
        ),
    ):
        entries, without = [], []
        for row in line.of("compress"):
            layers = row.content.get("layers.jsonl") or []
            pairs = finite((index, entry.get(key)) for index, entry in enumerate(layers))
            dots = [(str(layers[int(index)].get("name", "?")), error) for index, error in pairs if error > 1e-30]
            entries += [(row.name, dots)] if dots else []
            without += [row.name] if not pairs and layers else []
        if entries:
            chart = both(lambda width, entries=entries, title=title: bars.strips(entries, width, title))
            missing = f" Without calibration text, so not known: {', '.join(without)}." if without else ""
            return [(title, chart, f"{words} Log scale; the bar is the median.{missing}")]
    return []


def speeds(line: Line) -> list[tuple[str, Markup, str]]:
    """(title, chart, sentence) for training speed, generation speed and energy per token."""
    found = []
    served = [arm.rows[0] for arm in arms.serving(line) if len(arm.rows) == 1]  # repeated ones have their own section
    for title, rows, words in (
        ("Training, tokens per second", line.of("train"), _mfu_words(line)),
        ("Generation, tokens per second", served, ""),
    ):
        shown = [_bar(row, "tokens_per_s") for row in rows if "tokens_per_s" in row.figures]
        if shown:
            notes = {row.figures["tokens_per_s"].note for row in rows if "tokens_per_s" in row.figures} - {""}
            words = ". ".join([units.first_upper("; ".join(sorted(notes)))] * bool(notes) + [words] * bool(words))
            chart = both(lambda width, shown=shown, title=title: bars.bars(shown, width, "tokens/s", title))
            found.append((title, chart, words))
    wide = FULL if len(found) % 2 == 0 else HALF
    rows = [row for row in line.of("train", "serve") if "joules_per_token" in row.figures]
    if any(row.value("joules_per_token") is not None for row in rows):
        shown = [_bar(row, "joules_per_token") for row in rows]
        found.append(
            ("Joules per token", both(lambda width: bars.bars(shown, width, "J/token", "Joules per token"), wide), "")
        )
    elif line.of("train", "serve"):
        notes = sorted(
            {
                note
                for row in line.rows
                for name in ("joules_per_token", "energy_j")
                if name in row.figures and (note := row.figures[name].note)
            }
        )
        why = notes[0] if notes else "no energy sensor was found when the stages ran"
        found.append(
            (
                "Joules per token",
                Markup(""),
                f"not measured, {why.rstrip('.').removeprefix('no energy: ')}.",
            )
        )
    return found


def _mfu_words(line: Line) -> str:
    known = [
        f"{row.name} {units.show(row.value('mfu'), 'fraction')}"
        for row in line.of("train")
        if row.value("mfu") is not None
    ]
    return f"Share of this machine's calibrated matmul rate (MFU): {', '.join(known)}." if known else ""


def _bar(row: Row, name: str) -> bars.Bar:
    figure = row.figures[name]
    return bars.Bar(row.name, row.value(name), figure.note or "not measured", strong=row.kind == "train")


def serving(line: Line) -> dict[str, Any] | None:
    """Comparisons of repeated serving runs, and a table of all of them: a row per arm, with the settings that differ."""
    found = arms.serving(line)
    if not found:
        return None
    paths = [field for field in dict(found[0].fields) if field not in ("model", "data")][:6]
    names = [name for name in SERVING if any(arm.values(name) for arm in found)]
    waits = [
        (arm.name, fmean(low), fmean(high))
        for arm in found
        if (low := arm.values("ttft_p50_s")) and (high := arm.values("ttft_p99_s"))
    ]
    said = "Time to the first token of each run, median and 99th percentile"
    return {
        "trials": [_effect(trial) for trial in arms.trials(line) if trial.kind == "serve" and len(trial.arms) > 1],
        "paths": [units.first_upper(path.removeprefix("engine ")) for path in paths],
        "rows": [
            {
                "arm": arm,
                "model": _model_words(line, arm.rows[0]),
                "settings": [dict(arm.fields).get(path, "") for path in paths],
                "figures": [_with_stdev(arm, name) for name in names],
            }
            for arm in found
        ],
        "figures": names,
        "alone": len(found) > 1 and all(len(arm.rows) == 1 for arm in found),
        "repeated": any(len(arm.rows) > 1 for arm in found),
        "waits": both(lambda width: bars.ranges(waits, width, "s", said), FULL) if waits else None,
    }


def _with_stdev(arm: arms.Arm, name: str) -> str:
    """A figure's mean over an arm's runs, with their standard deviation if there are several: '1,480 ± 31'."""
    values = arm.values(name)
    if not values:
        return ""
    figure = next(row.figures[name] for row in arm.rows if row.value(name) is not None)
    unit = "" if name in ("tokens_per_s", "joules_per_token") else figure.unit
    mean = units.show(fmean(values), unit, name)
    if len(values) < 2 or not (deviation := stdev(values)):
        return mean
    return f"{mean} ± {units.show(deviation, unit, name)}"


def _model_words(line: Line, row: Row) -> str:
    model, draft = row.parent("model"), row.parent("draft")
    return (line.label(model.id) if model else "?") + (f", drafted by {line.label(draft.id)}" if draft else "")


def estimates(line: Line) -> dict[str, Any] | None:
    """All ratios by figure in one chart; the charts by artifact, time and memory first; the table rows with their errors."""
    checks = compare.checks(line)
    if not checks:
        return None
    names = list(dict.fromkeys(check.figure.name for check in checks))
    first = ("time_s", "tokens_per_s", "peak_memory_bytes", "memory_growth_bytes")
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    groups, few = [], []
    for name in names:
        of_name = [check for check in checks if check.figure.name == name]
        if len(of_name) < 4 and name not in ("time_s", "peak_memory_bytes"):
            few += of_name
            continue
        title = units.heading(name)
        groups.append(
            (
                title,
                both(
                    lambda width, of_name=of_name, title=title: bars.ratios(
                        of_name, width, f"{title}: estimate over measurement, by artifact"
                    )
                ),
            )
        )
    if few:
        said = "Other figures: estimate over measurement"
        room = FULL if len(groups) % 2 == 0 else HALF  # alone on its line, or beside another
        groups.append(("Other figures", both(lambda width: bars.ratios(few, width, said, mixed=True), room)))
    known = {name: [check for check in checks if check.figure.name == name and check.ratio] for name in names}
    told = [
        (name, found) for name, found in known.items() if any(abs((check.ratio or 1) - 1) > EXACT for check in found)
    ]
    sure = [units.label(name) for name, found in known.items() if found and name not in dict(told)]
    said = "Estimate over measurement, by figure"
    return {
        "overview": both(lambda width: bars.ratio_dots(told, width, said), FULL) if told else "",
        "sure": ", ".join(sure),
        "charts": groups,
        "rows": [(check, compare.error_words(check)) for check in checks],
    }
