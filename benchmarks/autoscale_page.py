"""docs/simulation.md's tables and picture of autoscalers, and the ledger's rows, from runs of benchmarks.autoscale.

python -m benchmarks.autoscale_page .autoscale.jsonl [--no-ledger]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from benchmarks.autoscale import GOAL, GPU, INTERVAL_S, MOST, SEQS, START_S, STEP_FACTOR
from benchmarks.ledger import append, put_between
from hone.base.interval import half_width
from hone.report.page import standalone
from hone.report.svg import Scale, dot, drawing, group, line, path, place_labels, text, x_axis, y_axis

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "simulation.md"
PICTURE = ROOT / "docs" / "autoscaling.svg"
BEGIN, END = "<!-- autoscale: begin -->\n", "<!-- autoscale: end -->\n"
FIGURES = {
    "attainment": ("in time", "fraction"),
    "goodput": ("in time, requests/s", "requests/s"),
    "gpu_hours": ("GPU hours", "h"),
    "met_per_gpu_hour": ("in time a GPU hour", "requests"),
    "cold_starts": ("cold starts", ""),
    "most": ("most ready", ""),
    "queue_p99_s": ("queue p99, s", "s"),
    "ttft_p99_s": ("TTFT p99, s", "s"),
}
Rows = dict[str, dict[str, list[dict[str, Any]]]]
"""Runs by trace and policy."""


def read(paths: Sequence[Path]) -> Rows:
    """The runs of `paths`: of each trace the seeds that every policy has run with."""
    found: Rows = {}
    for one in paths:
        for row in map(json.loads, one.read_text(encoding="utf8").splitlines()):
            found.setdefault(row["trace"], {}).setdefault(row["policy"], []).append(row)
    for trace, policies in found.items():
        seeds = set.intersection(*({row["seed"] for row in rows} for rows in policies.values()))
        if not seeds:
            raise SystemExit(
                f"error: no seed of {trace} has run with every policy\nfix: let benchmarks.autoscale go on"
            )
        found[trace] = {name: [row for row in rows if row["seed"] in seeds] for name, rows in policies.items()}
    return found


def spread(values: list[float]) -> tuple[float, float] | None:
    """The interval of the mean at 95 % with three values and more, the range of two, None of one."""
    if len(values) < 2:
        return None
    half = half_width(values) if len(values) > 2 else 0.0
    return (fmean(values) - half, fmean(values) + half) if half else (min(values), max(values))


def shown(name: str, values: list[float]) -> str:
    """Mean and spread, as a cell."""
    scale = 100.0 if name == "attainment" else 1.0
    mean, around = fmean(values) * scale, spread(values)
    digits = 0 if abs(mean) >= 100 else 1 if name in ("attainment", "cold_starts", "most") or abs(mean) >= 10 else 2
    said = f"{mean:.{digits}f}{' %' if scale > 1 else ''}"
    if around is None or around[0] == around[1]:
        return said
    return f"{said} ({max(around[0], 0) * scale:.{digits}f} to {min(around[1], 1.0 if scale > 1 else around[1]) * scale:.{digits}f})"


def tables(runs: Rows) -> str:
    """A table for each trace, with the conditions above it."""
    parts = []
    for trace, policies in runs.items():
        rows = next(iter(policies.values()))
        first, count = rows[0], len(rows)
        seeds = (
            f"{count} seeds, mean and 95 % interval"
            if count > 2
            else "2 seeds, mean and both"
            if count > 1
            else "one seed"
        )
        parts.append(
            f"\n`{trace}`, {first['share']:.0%} of its requests: {first['requests']:,} in an hour, {first['rate']:.2f} a second, the busiest minute {max(first['rates']):.2f}, "
            f"gaps' coefficient of variation {first['burstiness']:.1f}; one replica serves {first['rate_per_replica']:.2f} a second in time ({seeds}):\n\n"
        )
        parts.append(
            "| policy | "
            + " | ".join(title for title, _ in FIGURES.values())
            + " |\n|---"
            + "|---:" * len(FIGURES)
            + "|\n"
        )
        for policy, some in policies.items():
            word, comma, rest = policy.partition(",")
            name = f"{policy} ({some[0]['begin']})" if policy.startswith("fixed") else f"`{word}`{comma}{rest}"
            cells = [shown(figure, [float(row[figure]) for row in some]) for figure in FIGURES]
            parts.append(f"| {name} | {' | '.join(cells)} |\n")
    return "".join(parts)


def picture(runs: Rows, width: float = 860) -> Markup:
    """For each trace: GPU hours against requests in time, and below it the replicas of each policy over the hour of the first seed."""
    gap, top, height, strip = 40.0, 34.0, 250.0, 46.0
    each = (width - gap * (len(runs) - 1)) / len(runs)
    named = {trace: [name for name in policies if "," not in name] for trace, policies in runs.items()}
    bands = 1 + max(map(len, named.values()))
    parts: list[Any] = []
    for place, (trace, policies) in enumerate(runs.items()):
        left, right = place * (each + gap) + 40, place * (each + gap) + each
        parts.append(text(left, 10, trace.removesuffix(".csv"), "name"))
        parts += _points(policies, left, right, top, top + height)
        parts += _strips(policies, named[trace], left, right, top + height + 66, strip)
    whole = top + height + 66 + bands * (strip + 14) + 20
    said = "; ".join(
        f"{trace}: "
        + ", ".join(
            f"{name} {fmean(row['attainment'] for row in rows):.0%} in {fmean(row['gpu_hours'] for row in rows):.2f} GPU hours"
            for name, rows in policies.items()
        )
        for trace, policies in runs.items()
    )
    return drawing(width, whole, f"Autoscalers on two traces: {said}", *parts)


def _points(
    policies: dict[str, list[dict[str, Any]]], left: float, right: float, top: float, bottom: float
) -> list[Any]:
    hours = {name: [row["gpu_hours"] for row in rows] for name, rows in policies.items()}
    met = {name: [row["attainment"] for row in rows] for name, rows in policies.items()}
    x = Scale(0, 1.15 * max(map(max, hours.values())), left, right)
    y = Scale(min(0.5, *map(min, met.values())) - 0.05, 1.04, bottom, top)
    parts: list[Any] = [y_axis(y, left, right, count=5), x_axis(x, bottom, count=5)]
    parts += [
        text(left, top - 8, "part of the requests in time", "tick"),
        text(right, bottom + 34, "GPU hours", "tick", "end"),
    ]
    places = {name: (round(x(fmean(hours[name])), 1), round(y(fmean(met[name])), 1)) for name in policies}
    # Of points in one place a fixed fleet is on top.
    for name in sorted(policies, key=lambda name: name.startswith("fixed")):
        px, py = places[name]
        around, across = spread(met[name]), spread(hours[name])
        if around is not None:
            parts.append(line(px, y(max(around[0], y.low)), px, y(min(around[1], 1.0)), "whisker"))
        if across is not None:
            parts.append(line(x(max(across[0], 0)), py, x(across[1]), py, "whisker"))
        kind = "best" if name.startswith("fixed") else "right"
        said = f"{name}: {fmean(met[name]):.1%} in time, {fmean(hours[name]):.2f} GPU hours"
        parts.append(group(said, dot(px, py, 5, f"point {kind}")))
    labels: dict[tuple[float, float], str] = {}
    for name, at in places.items():
        short = name.replace(" for the", "").replace("_", " ")
        labels[at] = f"{labels[at]} = {short}" if at in labels else short
    frame = left, top - 6, right + 4, bottom
    for box, label in zip(
        place_labels(list(labels), list(labels.values()), frame, size=13), labels.values(), strict=True
    ):
        parts.append(text(box[0], box[3] - 4, label, "pointlabel"))
    return parts


def _strips(
    policies: dict[str, list[dict[str, Any]]], names: list[str], left: float, right: float, top: float, height: float
) -> list[Any]:
    """Requests/s of each minute, then of each policy the replicas that are ready (dark) and wanted (faint)."""
    first = next(iter(policies.values()))[0]
    rates, end = first["rates"], 60.0 * len(first["rates"])
    x = Scale(0, end, left, right)
    most = max(max(count for _, count, _ in policies[name][0]["moments"]) for name in names)
    bands = [("requests/s", rates, max(rates))] + [(name, None, most) for name in names]
    parts: list[Any] = []
    for place, (name, values, high) in enumerate(bands):
        base = top + place * (height + 14) + height
        y = Scale(0, high, base, base - height + 12)
        parts += [line(left, base, right, base, "axis"), text(left, base - height + 6, name.replace("_", " "), "tick")]
        parts.append(text(left - 5, y(high) + 4, f"{high:.3g}", "tick", "end"))
        if values is not None:
            parts.append(path([(x(60.0 * at + 30), y(value)) for at, value in enumerate(values)], "val"))
            continue
        moments = [one for one in policies[name][0]["moments"] if one[0] <= end]
        for column, kind in ((1, "raw"), (2, "curve")):
            points: list[tuple[float, float]] = []
            for one in moments:
                if points:
                    points.append((x(one[0]), points[-1][1]))
                points.append((x(one[0]), y(one[column])))
            parts.append(path(points, kind))
    parts.append(text(right, top + len(bands) * (height + 14) + 4, f"{end / 60:.0f} minutes", "tick", "end"))
    return parts


def ledger_rows(runs: Rows) -> list[dict[str, Any]]:
    """A row for each trace, policy and figure."""
    how = f"{GPU}, {SEQS} requests a replica at once, TTFT <= {GOAL.ttft_s:g} s and TPOT <= {GOAL.tpot_s:g} s, cold start {START_S:g} s, a decision every {INTERVAL_S:g} s, at most {MOST} replicas, step times x {STEP_FACTOR}"
    rows = []
    for trace, policies in runs.items():
        for policy, some in policies.items():
            for figure, (_, unit) in FIGURES.items():
                values = [float(row[figure]) for row in some]
                around = spread(values)
                note = f"{some[0]['share']:.0%} of the trace's requests; {how}"
                row = {
                    "figure": f"{trace}: {policy}: {figure}",
                    "value": fmean(values),
                    "unit": unit,
                    "n": len(values),
                    "how": "modelled",
                    "note": note,
                }
                if around is not None:
                    row["interval"] = list(around)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kept", type=Path, nargs="+")
    parser.add_argument("--no-ledger", action="store_true")
    given = parser.parse_args()
    runs = read(given.kept)
    put_between(PAGE, BEGIN, END, tables(runs))
    PICTURE.write_text(standalone(picture(runs)), encoding="utf8")
    if not given.no_ledger:
        append("autoscale", ledger_rows(runs))


if __name__ == "__main__":
    main()
