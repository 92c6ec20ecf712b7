"""Reads published traces of requests: Azure's and BurstGPT's CSV files, Mooncake's JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hone.base.errors import SpecError
from hone.plan.simulate.traces import Arrival, Trace

Format = Literal["auto", "azure", "burstgpt", "mooncake"]
MOONCAKE_BLOCK = 512
"""Tokens behind one of Mooncake's hash_ids."""
_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}


def read_trace(path: Path | str, form: Format = "auto", count: int = 0) -> Trace:
    """The first `count` requests (0: all) of a file, by time, the first at 0 s.

    azure: TIMESTAMP,ContextTokens,GeneratedTokens (Azure/AzurePublicDataset, CC-BY; Patel et al. 2024, arXiv:2311.18677).
    burstgpt: Timestamp in s, Request tokens, Response tokens; a response without tokens is a failure and left out (HPMLL/BurstGPT,
    CC-BY-4.0; Wang et al. 2024, arXiv:2401.17644). mooncake: JSON lines with timestamp in ms, input_length, output_length, hash_ids
    of 512-token blocks (kvcache-ai/Mooncake, Apache-2.0; Qin et al. 2024, arXiv:2407.00079). Raises SpecError that names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise SpecError(f"there is no trace file {path}", fix="give the path of a CSV or JSON lines file")
    found: list[Arrival] = []
    with path.open(encoding="utf-8-sig", newline="") as lines:
        form = _form_of(path, lines) if form == "auto" else form
        rows = _mooncake(lines) if form == "mooncake" else _csv(lines, form, path)
        line = 0
        try:
            for row in rows:
                line, arrival = row
                if arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1:
                    found.append(arrival)
                if count and len(found) == count:
                    break
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"{path}, after line {line or 1}: not a row of a {form} trace ({type(error).__name__}: {error})",
                fix=f"the columns are {', '.join(_COLUMNS.get(form, ('timestamp', 'input_length', 'output_length')))}",
            ) from None
    if not found:
        raise SpecError(f"{path} has no request with a prompt and an answer", fix="give a trace with requests")
    found.sort(key=lambda one: one.time_s)
    return Trace(tuple(found), path.name).first(0)


def _form_of(path: Path, lines: Any) -> Format:
    """The format that the first line shows; the file is at its start again."""
    first = lines.readline()
    lines.seek(0)
    if first.lstrip().startswith("{"):
        return "mooncake"
    names = [name.strip() for name in first.split(",")]
    for form, columns in _COLUMNS.items():
        if set(columns) <= set(names):
            return form  # type: ignore[return-value]
    raise SpecError(
        f"{path} begins with {first.strip()[:80]!r}, which no known trace does",
        fix="give an Azure or BurstGPT CSV with its header, or Mooncake's JSON lines; or say --format",
    )


def _csv(lines: Any, form: Format, path: Path) -> Iterator[tuple[int, Arrival]]:
    reader = csv.DictReader(lines)
    names = [name.strip() for name in reader.fieldnames or ()]
    missing = [name for name in _COLUMNS[form] if name not in names]
    if missing:
        raise SpecError(f"{path} has no column {missing[0]}", fix=f"a {form} trace has {', '.join(_COLUMNS[form])}")
    reader.fieldnames = names
    when, prompt, output = _COLUMNS[form]
    for row in reader:
        time_s = _seconds(row[when]) if form == "azure" else float(row[when])
        yield reader.line_num, Arrival(time_s, int(float(row[prompt])), int(float(row[output])))


def _seconds(text: str) -> float:
    """Seconds of '2023-11-16 18:15:46.6805900' (the fraction has 7 digits) since an epoch; an offset from UTC is read, too."""
    whole, point, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return datetime.fromisoformat(whole + rest[len(digits) :]).timestamp() + (float(f"0.{digits}") if point else 0.0)


def _mooncake(lines: Any) -> Iterator[tuple[int, Arrival]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = json.loads(line)
            blocks = tuple(int(one) for one in row.get("hash_ids", ()))
            yield (
                number,
                Arrival(
                    float(row["timestamp"]) / 1e3,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    blocks,
                    MOONCAKE_BLOCK,
                ),
            )
