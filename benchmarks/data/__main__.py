"""Runs the benchmarks of the data room and adds their rows to ledger/data.jsonl.

    python -m benchmarks.data [AREA ...] --data FOLDER [--peers PYTHON] [--megabytes N] [--dry]

An area is a module of this folder with `rows(data, peers)`; the default is all. `--peers` is the interpreter of a virtual
environment with the peers; without it their columns stay empty.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import benchmarks.data
from benchmarks.ledger import append, table


def areas() -> list[str]:
    """Names of the modules of this folder that have rows."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.data.__path__))
    names = [name for name in names if not name.startswith(("_", "peers_"))]
    return [name for name in names if hasattr(importlib.import_module(f"benchmarks.data.{name}"), "rows")]


def rows_of(area: str, data: Path, peers: str | None, megabytes: float | None) -> list[dict[str, Any]]:
    """The rows of one area, each with the area's name."""
    rows = importlib.import_module(f"benchmarks.data.{area}").rows
    takes = inspect.signature(rows).parameters
    size = {"megabytes": megabytes} if megabytes and "megabytes" in takes else {}
    return [{"area": area, **row} for row in rows(data, peers, **size)]


def main() -> None:
    """Runs the named areas; each area's rows are added to the ledger before the next begins."""
    known = areas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of: {', '.join(known)}")
    parser.add_argument("--data", type=Path, required=True, help="folder of real data")
    parser.add_argument("--peers", help="interpreter of a virtual environment with the peers")
    parser.add_argument("--megabytes", type=float, help="size of the corpus, where an area has one")
    parser.add_argument("--dry", action="store_true", help="only show the rows")
    given = parser.parse_args()
    unknown = sorted(set(given.areas) - set(known))
    if unknown:
        parser.error(f"unknown area {', '.join(unknown)}; known are: {', '.join(known)}")
    for area in given.areas or known:
        rows = rows_of(area, given.data, given.peers, given.megabytes)
        print(table(rows), flush=True)
        if not given.dry:
            append("data", rows)


if __name__ == "__main__":
    main()
