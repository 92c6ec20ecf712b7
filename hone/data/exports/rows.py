"""Rows: documents as compressed JSONL, the dropped ones with the rule that dropped them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.errors import MissingExtra
from hone.base.lazy import lazy
from hone.data.corpus import Columns, Part
from hone.data.dedup.groups import COLUMNS, Named
from hone.data.expression import columns_of, evaluate
from hone.data.filters.base import Filter
from hone.data.filters.decide import causes as causes_of

parquet = lazy("pyarrow.parquet")

_ROWS = 512
_SHOWN = ("id", "source", "url", "metadata", "text")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes `rows` as JSON lines compressed by zstd; returns their number. Numbers that JSON has not (NaN) are null."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.of("writing .jsonl.zst", "zstandard", "data") from None
    count = 0
    with open(path, "wb") as raw, zstandard.ZstdCompressor(level=3).stream_writer(raw) as file:
        for row in rows:
            file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            count += 1
    return count


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as JSON: metadata as an object, NaN and infinity as null."""
    made = {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in row.items()}
    if "metadata" in made:
        made["metadata"] = json.loads(made["metadata"]) if made["metadata"] else {}
    return made


def kept_lines(folder: Path, documents: Path, name: str) -> dict[str, Any]:
    """A task: writes a file of kept documents as JSON lines into `folder`/`name`."""
    with parquet.ParquetFile(documents) as file:
        batches = file.iter_batches(batch_size=_ROWS)
        return {"rows": write_lines(folder / name, (row for batch in batches for row in batch.to_pylist()))}


def dropped_lines(
    folder: Path,
    part: Part,
    dropped_by: np.ndarray,
    causes: tuple[tuple[str, str], ...],
    filters: tuple[Filter, ...],
    clusters: Named | None,
) -> dict[str, Any]:
    """A task: writes the dropped documents of one shard; `dropped_by` (uint16 [its documents]) as in `results.write_signals`.

    A row: id, source, url, metadata, step, reason, `rule` (the expression that was not met) and `value` (of each of its
    columns), both null for steps without rules, the cluster of a duplicate, and the text before any cut.
    """
    told = told_rules(filters, Columns([part.shard], parquet.read_schema(part.shard).names, compact=False), dropped_by)

    def rows() -> Iterable[dict[str, Any]]:
        done = 0
        with parquet.ParquetFile(part.shard) as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(_SHOWN)):
                gone = np.flatnonzero(dropped_by[done : done + len(batch)])
                for place, row in zip(gone.tolist(), batch.take(gone).to_pylist() if len(gone) else ()):
                    index = done + place
                    step, reason = causes[dropped_by[index] - 1]
                    rule, value = told.get(index, (None, None))
                    why = {"step": step, "reason": reason, "rule": rule, "value": value}
                    if clusters is not None and clusters.sizes[index]:
                        why |= dict(zip(COLUMNS, (clusters.ids[index].decode(), int(clusters.sizes[index]))))
                    text = row.pop("text")
                    yield {**row, **why, "text": text}
                done += len(batch)

    return {"rows": write_lines(folder / f"{part.number:05d}.jsonl.zst", rows())}


def told_rules(
    filters: Sequence[Filter], columns: Columns, dropped_by: np.ndarray
) -> dict[int, tuple[str, dict[str, Any]]]:
    """{document: (expression, {column: value})} of the rule that dropped each document that a filter dropped."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for number, (place, reason) in enumerate(causes_of(filters)):
        gone = dropped_by == number + 1
        if not gone.any():
            continue
        for rule in filters[place].rules():
            if rule.reason != reason:
                continue
            names = sorted(columns_of(rule.keep))
            for index in np.flatnonzero(gone & ~evaluate(rule.keep, columns)).tolist():
                if index not in found:
                    values = {name: columns[name][index] for name in names}
                    found[index] = (
                        rule.keep,
                        {name: _number(value) for name, value in values.items()},
                    )
    return found


def _number(value: Any) -> Any:
    """A numpy value as a Python one; NaN is None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value
