"""docs/predictions.md, every measured row of the ledger beside what hone's estimates say of it: `python -m benchmarks.predictions`.

    python -m benchmarks.predictions                  # makes the page again
    python -m benchmarks.predictions --take DIR       # first adds what benchmarks.predicted.measured left in DIR to the ledger
    python -m benchmarks.predictions --worst 20       # only prints the rows that are furthest off

A row has up to three predictions: the one that its own call recorded before it measured, one made now with measured rates of that kind of
GPU, and one made now with a part of the data sheet. Rows without a configuration are counted by reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import ledger
from benchmarks.predicted import page, rates, rows


def take(folder: Path) -> int:
    """Adds a call's calibration and rows to the ledger; returns the number of rows. Rows that it has already stay as they are."""
    path = folder / "rows.jsonl"
    given = rows.read(path) if path.exists() else []
    if not given:
        raise SystemExit(f"error: {path} has no rows\nfix: let benchmarks.predicted.measured --out {folder} end")
    for file in sorted(folder.glob("calibration-*.json")):
        rates.store(file, given[0])
    added = 0
    for row in given:
        benchmark = row["benchmark"]
        if row in rows.read(ledger.FOLDER / f"{benchmark}.jsonl"):
            continue
        with open(ledger.FOLDER / f"{benchmark}.jsonl", "a", encoding="utf8") as file:
            file.write(rows.line(row) + "\n")
        added += 1
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--take", type=Path, action="append", default=[], help="folder of benchmarks.predicted.measured"
    )
    parser.add_argument("--worst", type=int, default=0, help="prints so many rows instead of making the page")
    given = parser.parse_args()
    for folder in given.take:
        print(f"{folder}: {take(folder)} rows added")
    if given.worst:
        print("\n".join(page.worst(given.worst)))
        return
    page.PAGE.write_text(page.text(), encoding="utf8")


if __name__ == "__main__":
    main()
