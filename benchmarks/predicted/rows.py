"""The ledger's rows of cost as pairs of what was measured and what was predicted, and the others counted by reason."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ledger import FOLDER
from benchmarks.predicted.configs import NO_RATES, OLDER, UNSAID, Config, config_of

SOURCES = {
    "train": "training",
    "serve": "serving",
    "compress": "compression",
    "data": "data",
    "plan_memory": "memory",
    "plan_executed": "training",
    "serve_offload": "serving",
    "serve_cpu": "serving",
    "serve_http": "serving",
    "line": "whole recipes",
}
"""Benchmarks whose rows are of stages, and the room that they count for."""

FRESH = {"plan_executed", "serve_offload", "data", "plan_memory"}
"""Benchmarks that calibrate in the same call, or whose plans need no rates."""

LOWER = ("s", "ms", "ms/token", "B", "GiB", "relative error")
"""Units of which less is faster or smaller."""


class Pair(NamedTuple):
    """One measured value; what its own call predicted, None: nothing; its configuration, None: not known."""

    source: str
    room: str
    what: str
    """"time" or "memory", or "amount" of data."""
    figure: str
    unit: str
    measured: float | None
    """None: the row holds the error alone."""
    recorded: float | None
    fresh: bool | None
    """Whether `recorded` is of rates of the same call; None: the row does not say."""
    config: Config | None
    row: dict[str, Any]
    error: float | None = None
    """Of a row that holds the error alone."""

    def off(self, predicted: float | None) -> float | None:
        """Signed error of a prediction: of seconds or bytes, predicted over measured, less 1."""
        if predicted is None or not self.measured:
            return self.error if predicted is None else None
        ratio = predicted / self.measured
        return (ratio if self.unit in LOWER else 1 / ratio) - 1


class Left(NamedTuple):
    """Rows that are no pair, by benchmark and reason."""

    counts: Counter[tuple[str, str]]

    def add(self, benchmark: str, reason: str) -> None:
        self.counts[benchmark, reason] += 1


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(one) for one in path.read_text(encoding="utf8").splitlines()]


def line(row: dict[str, Any]) -> str:
    """A row as the ledger holds it."""
    return json.dumps(row, ensure_ascii=False)


def all_pairs() -> tuple[list[Pair], Left, int]:
    """(pairs, the rows left out, the number of rows) of the benchmarks of `SOURCES`."""
    pairs: list[Pair] = []
    left, total = Left(Counter()), 0
    for benchmark, room in SOURCES.items():
        rows = read(FOLDER / f"{benchmark}.jsonl")
        total += len(rows)
        newest = {_same(row): number for number, row in enumerate(rows)}
        for number, row in enumerate(rows):
            found = list(_pairs_of(benchmark, room, number, row))
            reasons = [one for one in found if isinstance(one, str)]
            if not reasons and newest[_same(row)] != number:
                reasons = [OLDER]
            if reasons:
                left.add(benchmark, reasons[0])
            else:
                pairs += [one for one in found if isinstance(one, Pair)]
    return pairs, left, total


def _same(row: dict[str, Any]) -> tuple[str, str, int]:
    """What a later measurement has in common with the one that it stands for."""
    machine = row["machine"]
    gpus = machine.get("gpus") or [{"name": str(machine.get("cpu"))}]
    return str(row.get("figure")), str(gpus[0]["name"]), int(machine.get("num_ranks") or 1)


def _pairs_of(benchmark: str, room: str, number: int, row: dict[str, Any]) -> Iterator[Pair | str]:
    """The pairs of a row, or why it has none."""
    source = f"{benchmark}:{number + 1}"
    if row.get("value") is None:
        yield "no value"
    elif benchmark == "data":
        yield from _forecast(source, row)
    elif benchmark == "plan_executed":
        yield from _executed(source, row)
    elif benchmark == "plan_memory":
        told = {"measured": row["value"], "recorded": row["peer_value"], "fresh": True}
        yield Pair(source, "memory", "memory", row["figure"], "B", config=None, row=row, **told)
    elif benchmark == "serve_http":
        yield "the HTTP front, of which no estimate is"
    else:
        yield from _staged(benchmark, room, source, row)


def _forecast(source: str, row: dict[str, Any]) -> Iterator[Pair | str]:
    """Of benchmarks.data.forecast: predicted over measured, less 1, of whole data stages."""
    if row.get("area") != "forecast" or row["unit"] != "relative error":
        yield "a rate or a quality of one technique; a plan of text is measured on a sample of the text, which no row holds"
        return
    what = "memory" if row["figure"].endswith("peak_memory_bytes") else "amount"
    yield Pair(source, "data", what, row["figure"], "", None, None, True, None, row, error=row["value"])


_TOLD = re.compile(r"(?P<label>[^;:]+): (?P<predicted>[\d.e+-]+) s predicted, (?P<took>[\d.e+-]+) s")


def _executed(source: str, row: dict[str, Any]) -> Iterator[Pair | str]:
    """The configurations that a search executed, which stand in the note of the row of their median error."""
    if not row["figure"].endswith("median error of predictions"):
        yield "a median or a ratio of configurations that count themselves"
        return
    what = row["figure"].partition(",")[0] + row["figure"].partition(",")[2].partition(",")[0]
    for found in _TOLD.finditer(row.get("note", "")):
        label = f"{what}: {found['label'].strip()}"
        took, told = float(found["took"]), float(found["predicted"])
        yield Pair(
            source, "training" if "train" in what else "serving", "time", label, "s", took, told, True, None, row
        )


def _staged(benchmark: str, room: str, source: str, row: dict[str, Any]) -> Iterator[Pair | str]:
    """Time or memory of a row, and the peak of memory that stands beside a time."""
    config, recorded = config_of(benchmark, row), row.get("predicted")
    on_gpu = str(row["machine"].get("device", "")).startswith("cuda")
    if isinstance(config, str) and (recorded is None or config == "measures a peer's code"):
        peak = row.get("predicted_peak_bytes") is not None and row.get("peak_bytes")
        if not peak:
            yield config
            return
    if recorded is None and not on_gpu:
        yield NO_RATES
        return
    known = None if isinstance(config, str) else config
    fresh = True if benchmark in FRESH or row.get("calibration") else None
    memory = row["unit"] in ("B", "GiB")
    if known is not None or recorded is not None:
        unit = row["unit"]
        value, told = (row["value"], recorded)
        yield Pair(source, room, "memory" if memory else "time", row["figure"], unit, value, told, fresh, known, row)
    peak, told = row.get("peak_bytes"), row.get("predicted_peak_bytes")
    if peak and (told or known is not None):
        yield Pair(source, room, "memory", f"{row['figure']}: peak memory", "B", peak, told, True, known, row)
    elif not (known is not None or recorded is not None):
        yield UNSAID


def of_room(pairs: Sequence[Pair], room: str, what: str) -> list[Pair]:
    """Those of a room and kind."""
    return [one for one in pairs if (one.room, one.what) == (room, what)]
