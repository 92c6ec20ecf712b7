"""Writes a line's report: index.html, report.md and report.json beside its artifacts, and a picture for a README."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.base.durable import write_atomic
from hone.report import arms, charts, compare, markdown, page
from hone.report.chain import chain
from hone.report.collect import Line, collect
from hone.report.findings import findings
from hone.report.sections.prices import Prices, Rates
from hone.report.svg import drawing, el

SCHEMA = 1
"""Version of report.json's layout; incremented when a key is renamed, removed or changes its meaning."""


def build(line_folder: Path | str, out: Path | str | None = None, rates: Rates | None = None) -> Path:
    """Reads the artifacts in `line_folder`, writes the report into `out` (default: its subfolder `report`).

    Returns the path of index.html. Raises ArtifactError when there is nothing to report. Reads hone.json and
    the text files beside it, no weights; the same artifacts give byte-identical reports. With `rates` it also says what artifacts cost in money and carbon.
    """
    line = collect(line_folder)
    line.rates = rates
    out = Path(out) if out is not None else Path(line_folder) / "report"
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(
        out / "report.json", (json.dumps(rows(line), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    )
    write_atomic(out / "report.md", markdown.render(line).encode())
    write_atomic(out / "index.html", page.render(line).encode())
    return out / "index.html"


def picture(line_folder: Path | str, out: Path | str) -> Path:
    """Writes one SVG file of the chain and the quality chart, with a light background. Returns its path.

    Raises ArtifactError when there is nothing to draw.
    """
    line = collect(line_folder)
    upper = chain(line, 1080.0)
    width, height = page.size_of(upper)
    placed = [upper]
    points, _ = compare.quality_points(line)
    views = compare.quality_views(points) if points else []
    metric = compare.quality_metric(line)
    for place, (_, seen) in enumerate(views):
        each = (width - 40 * (len(views) - 1)) / len(views)
        lower = charts.quality(seen, each, metric, compare.quality_unit(line))
        placed.append(el("g", lower, transform=f"translate({place * (each + 40):g} {height + 32:g})"))
    whole_height = height + (32 + page.size_of(lower)[1] if views else 0)
    said = f"The chain of {line.name}, and the quality of its models against their size"
    whole = drawing(width, whole_height, said, *placed)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page.standalone(whole).encode())
    return out


def rows(line: Line) -> dict[str, Any]:
    """The content of report.json: every artifact with its figures, and what was computed from them."""
    points, left_out = compare.quality_points(line)
    artifacts = []
    for row in line.rows:
        artifacts.append(
            {
                "id": row.id,
                "kind": row.kind,
                "name": row.name,
                "fingerprint": row.fingerprint,
                "parents": [asdict(parent) for parent in row.parents],
                "techniques": row.techniques,
                "spec": row.spec,
                "figures": [
                    {**figure.model_dump(mode="json"), "error": figure.error} for figure in row.figures.values()
                ],
                "num_bytes": row.num_bytes,
                "machine": row.machine,
                "provenance": row.provenance,
            }
        )
    found = {
        "schema": SCHEMA,
        "line": line.name,
        "findings": [asdict(finding) for finding in findings(line)],
        "problems": [{"name": name, "what": what} for name, what in line.problems],
        "quality": {
            "metric": compare.quality_metric(line),
            "points": [asdict(point) for point in points],
            "left_out": [row.id for row in left_out],
        },
        "effects": [_trial(trial) for trial in arms.trials(line)],
        "artifacts": artifacts,
    }
    if (prices := Prices.of(line)) is not None:
        found["prices"] = {
            "rates": line.rates._asdict(),
            "artifacts": {bill.row.id: [one._asdict() for one in bill.figures] for bill in prices.bills},
        }
    return without_nan(found)


def _trial(trial: arms.Trial) -> dict[str, Any]:
    """One stage's arms over seeds: each figure of each arm, with its difference from the first arm's."""
    return {
        "kind": trial.kind,
        "on": trial.name,
        "arms": [
            {"label": arm.label, "fields": dict(arm.fields), "artifacts": [row.id for row in arm.rows]}
            for arm in trial.arms
        ],
        "figures": {
            name: [
                {
                    "arm": trial.arms.index(effect.arm),
                    "values": effect.values,
                    "mean": effect.mean,
                    "stdev": effect.stdev,
                    "half_interval": effect.half,
                    "difference": effect.difference and effect.difference.by,
                    "difference_half_interval": effect.difference and effect.difference.half,
                    "verdict": effect.verdict,
                }
                for effect in trial.effects(name)
            ]
            for name in trial.figures
        },
    }


def without_nan(values: Any) -> Any:
    """`values` with every number that is not valid JSON as a string: 'nan', 'inf', '-inf'."""
    if isinstance(values, dict):
        return {str(key): without_nan(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_nan(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values
