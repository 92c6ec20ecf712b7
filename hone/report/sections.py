"""What each section of the page shows: tables, sentences and charts, computed from the collected rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from hone.report import bars, charts, compare, units
from hone.report.collect import Line, Row, finite

FULL, HALF, PHONE = 1098.0, 516.0, 326.0
"""Chart widths in pixels: a whole row of the page, half of one, a phone."""
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


def both(draw: Callable[[float], Markup], wide: float = HALF) -> Markup:
    """A chart drawn twice, for a wide and for a narrow screen; the style sheet shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(PHONE))


def losses(line: Line) -> list[tuple[Row, Markup, str]]:
    """(row, chart, sentence) of every training run with a steps.jsonl."""
    rows = [row for row in line.of("train") if any(charts.loss_series(row))]
    domain = charts.loss_domain(rows)
    if domain is None:
        return []
    wide = HALF if len(rows) > 1 else FULL
    found = []
    for row in rows:
        words = []
        for name in ("num_params", "train_tokens", "val_loss", "val_bits_per_byte", "time_s"):
            if row.value(name) is not None:
                words.append(f"{units.label(name)} {units.show(row.value(name), row.figures[name].unit, name)}")
        found.append((row, both(lambda width, row=row: charts.loss(row, width, domain), wide), "; ".join(words)))
    return found


def distilled(line: Line) -> bool:
    return any(row.parent("teacher") for row in line.of("train"))


def quality(line: Line) -> dict[str, Any] | None:
    """Chart and table of the evaluated models; None without a comparable evaluation."""
    points, left_out = compare.quality_points(line)
    if not points:
        return None
    metric = compare.quality_metric(line)
    base = next((point for point in points if point.model == compare.base_model(line)), None)
    rows = []
    for point in sorted(points, key=lambda point: (-point.num_bytes, point.quality)):
        row, model = line.get(point.id), line.get(point.model)
        compared = base is not None and point is not base
        rows.append(
            {
                "row": row,
                "label": point.label,
                "words": compare.technique_words(model.techniques)
                if model and model.techniques
                else "as trained"
                if model
                else "from outside",
                "bytes": point.num_bytes,
                "smaller": f"{units.three(base.num_bytes / point.num_bytes)}x" if compared and base else "",
                "change": units.signed_percent(point.quality / base.quality - 1)
                if compared and base and base.quality
                else "",
            }
        )
    figure = next(row.figures[metric] for row in line.of("eval") if row.id == points[0].id)
    note = f"{units.label(metric).capitalize()} over: {figure.note}. " if figure.note else ""
    if left_out:
        note += f"Not comparable (other data, other window, or no figure) and left out: {', '.join(row.id for row in left_out)}."
    return {
        "chart": both(lambda width: charts.quality(points, width, metric, figure.unit), FULL),
        "rows": rows,
        "metric": metric,
        "note": note,
        "layers": _layers(line),
    }


def _layers(line: Line) -> Markup | None:
    entries = []
    for row in line.of("compress"):
        pairs = finite((index, entry.get("error")) for index, entry in enumerate(row.content.get("layers.jsonl") or []))
        names = [str(entry.get("name", "?")) for entry in row.content.get("layers.jsonl") or []]
        dots = [(names[int(index)], error) for index, error in pairs if error > 0]
        if dots:
            entries.append((row.name, dots))
    if not entries:
        return None
    return both(lambda width: bars.strips(entries, width, "Relative output error of each layer, by variant"), FULL)


def speeds(line: Line) -> list[tuple[str, Markup, str]]:
    """(title, chart, sentence) for training speed, generation speed and energy per token."""
    found = []
    for title, rows, words in (
        ("Training, tokens per second", line.of("train"), _mfu_words(line)),
        ("Generation, tokens per second", line.of("serve"), "All requests of a run together."),
    ):
        shown = [_bar(row, "tokens_per_s") for row in rows if "tokens_per_s" in row.figures]
        if shown:
            found.append(
                (title, both(lambda width, shown=shown, title=title: bars.bars(shown, width, "tokens/s", title)), words)
            )
    rows = [row for row in line.of("train", "serve") if "joules_per_token" in row.figures]
    if any(row.value("joules_per_token") is not None for row in rows):
        shown = [_bar(row, "joules_per_token") for row in rows]
        found.append(
            ("Joules per token", both(lambda width: bars.bars(shown, width, "J/token", "Joules per token")), "")
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
                Markup('<p class="absent">Not measured: {}.</p>').format(why.rstrip(".")),
                "An absent sensor is no zero: no joule figure is shown on this page.",
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
    return bars.Bar(
        row.name,
        row.value(name),
        figure.note or "not measured",
        strong=row.kind == "train" or row.name in ("plain", "base"),
    )


def serving(line: Line) -> dict[str, Any] | None:
    """Table of the serving runs with the settings in which they differ, and the one-change pairs."""
    rows = line.of("serve")
    if not rows:
        return None
    pairs = compare.serving_pairs(line)
    found = {
        path: None
        for row in rows[1:]
        for path, *_ in compare.changes(line, rows[0], row)
        if path not in ("model", "data")
    }
    paths = list(found)[:6]
    waits = [
        (row.name, low, high)
        for row in rows
        if (low := row.value("ttft_p50_s")) is not None and (high := row.value("ttft_p99_s")) is not None
    ]
    return {
        "base": pairs[0].base.id if pairs else "",
        "pairs": [
            {
                "ratio": pair.ratio,
                "shown": f"{units.three(pair.ratio)}x",
                "after": compare.setting(pair.path, pair.after),
                "before": compare.setting(pair.path, pair.before),
                "id": pair.other.id,
            }
            for pair in sorted(pairs, key=lambda pair: -pair.ratio)
        ],
        "paths": [path.rpartition(".")[2].replace("_", " ").capitalize() for path in paths],
        "rows": [
            {"row": row, "model": _model_words(line, row), "settings": [_short(_at(row, line, path)) for path in paths]}
            for row in rows
        ],
        "figures": [name for name in SERVING if any(row.value(name) is not None for row in rows)],
        "waits": both(
            lambda width: bars.ranges(
                waits, width, "s", "Time to the first token of each run, median and 99th percentile"
            ),
            FULL,
        )
        if waits
        else None,
    }


def _model_words(line: Line, row: Row) -> str:
    model, draft = row.parent("model"), row.parent("draft")
    return (line.label(model.id) if model else "?") + (f", drafted by {line.label(draft.id)}" if draft else "")


def _at(row: Row, line: Line, path: str) -> Any:
    parent = row.parent(path)
    if parent is not None:
        return line.label(parent.id)
    value: Any = row.spec
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        rest = ", ".join(
            f"{key.replace('_', ' ')} {entry}"
            for key, entry in value.items()
            if key != "kind" and not isinstance(entry, dict | list)
        )
        return f"{value.get('kind', '')} {f'({rest})' if rest else ''}".strip()
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def estimates(line: Line) -> dict[str, Any] | None:
    """Ratio charts by figure, time and memory first, and the table rows with their errors."""
    checks = compare.checks(line)
    if not checks:
        return None
    names = list(dict.fromkeys(check.figure.name for check in checks))
    names.sort(
        key=lambda name: ("time_s", "peak_memory_bytes").index(name) if name in ("time_s", "peak_memory_bytes") else 2
    )
    groups = []
    for name in names:
        of_name = [check for check in checks if check.figure.name == name]
        title = units.label(name).capitalize()
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
    return {"charts": groups, "rows": [(check, bars.error_words(check)) for check in checks]}


def data(line: Line, row: Row) -> dict[str, Any]:
    """Waterfalls, reasons with samples, languages and sources of one data artifact."""
    stats = row.content.get("stats.json") or {}
    steps = [step for step in stats.get("steps") or [] if isinstance(step, dict)]
    falls = []
    for title, key, unit in (("Text", "bytes", "B"), ("Documents", "documents", "documents")):
        known = [
            (str(step.get("name", "?")), *pair[0])
            for step in steps
            if (pair := finite([(step.get(f"{key}_in"), step.get(f"{key}_out"))]))
        ]
        if known:
            falls.append(
                (
                    title,
                    both(
                        lambda width, known=known, unit=unit, title=title: bars.waterfall(
                            known, width, unit, f"{title} left after each step"
                        )
                    ),
                )
            )
    reasons = _reasons(steps, row.content.get("dropped.jsonl") or [])
    words = [
        f"{units.show(row.value(name), row.figures[name].unit, name)} {units.label(name).rpartition(' ')[2] if name.endswith('bytes') else ''}".strip()
        for name in ("input_bytes", "kept_bytes", "train_tokens")
        if row.value(name) is not None
    ]
    shares = []
    for title, key in (("Languages", "languages"), ("Sources", "sources")):
        table = stats.get(key)
        if isinstance(table, dict) and table:
            entries = finite_items(table)
            if entries:
                shown = [bars.Bar(name, value) for name, value in entries[:10]]
                shares.append(
                    (
                        title,
                        both(lambda width, shown=shown, title=title: bars.bars(shown, width, "B", f"{title} by bytes")),
                    )
                )
    return {
        "row": row,
        "words": f"{row.id}: {', '.join(words)}." if words else row.id,
        "falls": falls,
        "reasons": reasons,
        "shares": shares,
        "samples": [_sample(entry) for entry in (row.content.get("sample.jsonl") or [])[:4]],
    }


def finite_items(table: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, bytes) of a statistics table, largest first."""
    found = [(str(name), entry.get("bytes")) for name, entry in table.items() if isinstance(entry, dict)]
    return sorted(
        ((name, float(value)) for name, value in found if isinstance(value, int | float) and math.isfinite(value)),
        key=lambda entry: (-entry[1], entry[0]),
    )


def _reasons(steps: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every reason of every step with its amounts and samples; samples of an uncounted reason come last."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps:
        for reason, amounts in (step.get("reasons") or {}).items():
            amounts = amounts if isinstance(amounts, dict) else {}
            documents, size = amounts.get("documents") or 0, amounts.get("bytes") or 0
            name = f"{step.get('name', '?')}: {reason}"
            found[str(step.get("name")), str(reason)] = {
                "name": name,
                "words": f"{units.show(documents, 'documents')}, {units.show_bytes(size)}",
                "samples": [],
            }
    for entry in dropped:
        key = (str(entry.get("step")), str(entry.get("reason")))
        found.setdefault(key, {"name": f"{key[0]}: {key[1]}", "words": "", "samples": []})["samples"].append(
            _sample(entry)
        )
    return list(found.values())


def _sample(entry: dict[str, Any]) -> dict[str, str]:
    return {"source": str(entry.get("source", "")), "text": str(entry.get("text", ""))[:2000]}


def sayings(line: Line, most: int = 6) -> list[dict[str, Any]]:
    """For each prompt the distinct texts, with the runs that wrote them and where they leave the first one."""
    texts: dict[str, dict[str, list[str]]] = {}
    for row in line.of("serve"):
        for entry in row.content.get("samples.jsonl") or []:
            texts.setdefault(str(entry.get("prompt", "")), {}).setdefault(str(entry.get("text", "")), []).append(
                row.name
            )
    found = []
    for prompt, by_text in list(texts.items())[:most]:
        order = sorted(by_text, key=lambda text: ("plain" not in by_text[text], -len(by_text[text])))
        groups = []
        for text in order:
            same = len(text) if text == order[0] else _agreeing(text, order[0])
            groups.append({"runs": ", ".join(by_text[text]), "same": text[:same], "other": text[same:]})
        found.append({"prompt": prompt, "groups": groups})
    return found


def _agreeing(one: str, other: str) -> int:
    """How many characters two texts share from the start."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def machines(line: Line) -> list[dict[str, Any]]:
    """One entry per distinct machine, then one per distinct set of versions, with the artifacts made there."""
    found = []
    for title, key, words in (("Machine", "machine", machine_facts), ("Versions", "provenance", version_facts)):
        groups: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
        for row in line.rows:
            facts = words(getattr(row, key))
            groups.setdefault(json.dumps(facts), (facts, []))[1].append(row.id)
        for facts, ids in groups.values():
            of = (
                ""
                if len(groups) == 1
                else f" of {', '.join(ids) if len(ids) <= 4 else f'{ids[0]} and {len(ids) - 1} more'}"
            )
            found.append({"title": title + of, "facts": facts or [("", "not described")]})
    return found


def machine_facts(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """What a machine is, in words; nested descriptions are flattened."""
    facts = []
    for key, value in machine.items():
        if key.endswith("_bytes") and isinstance(value, int | float):
            facts.append((key.removesuffix("_bytes").replace("ram", "memory"), units.show_bytes(value)))
        elif key == "calibration":
            facts.append(
                (key, "not calibrated: estimates of time are limits" if not value else "calibrated before the run")
            )
        elif isinstance(value, list):
            shown = [str(entry.get("name", entry)) if isinstance(entry, dict) else str(entry) for entry in value]
            facts.append((key, ", ".join(shown) or "none"))
        elif value is not None and not isinstance(value, dict):
            facts.append((key.replace("num_", "").replace("_", " "), str(value)))
    return facts


def version_facts(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """hone, commit and packages; the time and the command belong to single artifacts and are left out."""
    commit = provenance.get("commit")
    facts = [("hone", str(provenance.get("hone", "unknown")))]
    facts.append(
        ("commit", f"{commit}{' with uncommitted changes' if provenance.get('dirty') else ''}" if commit else "unknown")
    )
    packages = provenance.get("packages")
    return facts + [
        (str(name), str(version or "absent"))
        for name, version in (packages.items() if isinstance(packages, dict) else ())
    ]
