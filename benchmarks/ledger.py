"""The ledger: committed results of benchmarks, one JSON row per figure, the peer measured in the same run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hone.base.provenance import provenance
from hone.measure.machine import describe

FOLDER = Path(__file__).parent / "ledger"


def stamp_of(device: str = "cpu", num_ranks: int = 1) -> dict[str, Any]:
    """What a row says about where it was measured: time, commit, machine and its ranks, versions of packages."""
    machine = {**describe(device).model_dump(mode="json"), "num_ranks": num_ranks}
    machine.pop("calibration", None)
    made = provenance()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": made["commit"],
        "dirty": made["dirty"],
        "machine": machine,
        "packages": made["packages"],
    }


def append(
    benchmark: str, rows: list[dict[str, Any]], device: str = "cpu", stamp: dict[str, Any] | None = None
) -> Path:
    """Adds `rows` to ledger/<benchmark>.jsonl, each with machine, versions and commit.

    A row holds `figure`, `value`, `unit`, `n` and, where there is one, `peer`, `peer_value` and `ratio` (hone over peer);
    `of_limit` is the fraction of the physical limit; `stamp` is of the machine that measured, if it was another one
    (`stamp_of` there); `technique` ('slot/name') makes it appear in docs/techniques.md.
    """
    stamp = stamp or stamp_of(device)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{benchmark}.jsonl"
    with open(path, "a", encoding="utf8") as file:
        for row in rows:
            file.write(json.dumps({"benchmark": benchmark, **row, **stamp}, ensure_ascii=False) + "\n")
    return path


class Kept:
    """Rows of a run on a machine whose checkout is not kept: a file of lines, the stamp first and then each row as it ends."""

    def __init__(self, path: Path, device: str, commit: str | None = None) -> None:
        """`commit`: of the code that runs, where its folder is no checkout."""
        stamp = stamp_of(device)
        if commit:
            stamp |= {"commit": commit, "dirty": False}
        self.path = path
        path.write_text(json.dumps({"stamp": stamp}) + "\n", encoding="utf8")

    def add(self, row: dict[str, Any]) -> None:
        """Writes a row at the end of the file."""
        with open(self.path, "a", encoding="utf8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(stamp, rows) of such a file."""
        first, *rows = (json.loads(line) for line in path.read_text(encoding="utf8").splitlines())
        return first["stamp"], rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as an aligned text table of figure, hone, peer, ratio, fraction of the limit (also the peer's, if one has it)."""
    cells = [["figure", "hone", "unit", "peer", "peer's", "ratio", "of limit"]]
    for row in rows:
        cells.append(
            [
                row["figure"],
                _short(row.get("value")),
                row.get("unit", ""),
                row.get("peer", "") or "",
                _short(row.get("peer_value")),
                _short(row.get("ratio")),
                _short(row.get("of_limit")),
            ]
        )
    if any("peer_of_limit" in row for row in rows):
        for line, more in zip(cells, ["peer's", *(_short(row.get("peer_of_limit")) for row in rows)]):
            line.append(more)
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands in `page` between the marks `begin` and `end`. Raises SystemExit where it has no such place."""
    before, mark, rest = page.read_text(encoding="utf8").partition(begin)
    _, close, after = rest.partition(end)
    if not (mark and close):
        raise SystemExit(f"error: {page} has no place for the table\nfix: put the lines {begin!r} and {end!r} into it")
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf8")
