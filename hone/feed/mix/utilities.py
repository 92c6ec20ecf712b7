"""Utilities of each source for each task, from a table or from training runs on one source each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.artifact import MANIFEST, Artifact
from hone.base.durable import input_file
from hone.base.errors import SpecError
from hone.feed.mix.base import Source, by_source

Table = dict[str, dict[str, float]]
"""Value by source and task."""


def read_table(path: Path | str) -> Table:
    """The JSON object {source: {task: number}} in `path`. Raises SpecError."""
    try:
        table = json.loads(input_file(path, "mixture.table").read_text(encoding="utf8"))
    except (ValueError, OSError, RecursionError) as error:
        raise SpecError(f"mixture.table: {path} is not JSON: {error}", fix="write {source: {task: number}}") from None
    if not (isinstance(table, dict) and table and all(_is_row(row) for row in table.values())):
        raise SpecError(f"mixture.table: {path} is not a table of numbers", fix="write {source: {task: number}}")
    return {source: {task: float(value) for task, value in row.items()} for source, row in table.items()}


def read_runs(runs: Mapping[str, str], figures: Sequence[str]) -> Table:
    """The named figures of one artifact per source. Without names: every loss by source that all of them measured."""
    rows = {}
    for source, folder in runs.items():
        found = Artifact.read(Path(folder).expanduser()).figures
        rows[source] = {name: figure.value for name, figure in found.items() if figure.value is not None}
    tasks = list(figures)
    if not tasks:
        tasks = [name for name in next(iter(rows.values())) if name.startswith("val_loss_")]
        tasks = [name for name in tasks if all(name in row for row in rows.values())]
    if not tasks:
        raise SpecError(
            f"mixture.runs: the runs {', '.join(runs.values())} have no loss by source in common",
            fix="name the figures to compare by: mixture.tasks=[val_loss]",
        )
    for source, row in rows.items():
        for task in tasks:
            if task not in row:
                raise SpecError(f"{runs[source]} has no figure '{task}'", fix=f"its figures: {', '.join(row)}")
    return {source: {task: row[task] for task in tasks} for source, row in rows.items()}


def run_files(runs: Mapping[str, str]) -> dict[str, Path]:
    """The manifests of `runs`, for the identity of what depends on them."""
    return {f"mixture.runs.{source}": Path(folder).expanduser() / MANIFEST for source, folder in runs.items()}


def scale(table: Table, sources: Sequence[Source], lower_is_better: bool) -> tuple[np.ndarray, list[str]]:
    """(utilities float64 [sources, tasks] in 0..1, tasks): each task's worst source is 0, its best 1.

    A task with equal values for all sources is 1 for all. Raises SpecError for a missing value.
    """
    rows = by_source(table, sources, "the table of utilities")
    tasks = list(rows[0])
    for source, row in zip(sources, rows):
        if set(row) != set(tasks) or not tasks or not np.isfinite(list(row.values())).all():
            raise SpecError(
                f"the table of utilities: '{source.name}' has {row}, '{sources[0].name}' has the tasks {', '.join(tasks) or 'none'}",
                fix="give every source one finite number for every task",
            )
    values = np.array([[row[task] for task in tasks] for row in rows], float)
    if lower_is_better:
        values = -values
    low, high = values.min(0), values.max(0)
    return np.where(high > low, (values - low) / np.where(high > low, high - low, 1), 1.0), tasks


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in row.values())
