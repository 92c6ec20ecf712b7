"""Effect of one change on a model: arms of several seeds against each other, from the artifacts of a finished recipe.

    python -m benchmarks.effect work/curation bits_per_byte eval-on-curated-raw eval-on-curated-curated
    python -m benchmarks.effect work/curricula val_loss train-random train-staged train-warmup

FOLDER FIGURE BASE ARM...: an arm is all artifacts ARM-0, ARM-1, ... of the folder. Each arm's mean against that of BASE goes
to ledger/effect.jsonl, with the 95 % interval of the difference (Welch 1947: variances are not taken to be equal). The
line's report shows the same of all its arms.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.ledger import append, table
from hone.base.interval import welch


def seeds(folder: Path, arm: str, figure: str) -> list[float]:
    """The figure of every seed of an arm, in the order of names. Raises SystemExit for fewer than two."""
    found = []
    for manifest in sorted(folder.glob(f"{arm}-*/hone.json")):
        if re.fullmatch(rf"{re.escape(arm)}-\d+", manifest.parent.name):
            figures = json.loads(manifest.read_text(encoding="utf8"))["figures"]
            found += [row["value"] for row in figures if row["name"] == figure and row["value"] is not None]
    if len(found) < 2:
        raise SystemExit(f"{folder}: {len(found)} artifacts {arm}-N with a figure '{figure}', and two are the least")
    return found


def row(folder: Path, figure: str, base: str, arm: str) -> dict[str, Any]:
    """The ledger's row of one arm."""
    without, with_it = seeds(folder, base, figure), seeds(folder, arm, figure)
    found = welch(without, with_it)
    return {
        "figure": f"{figure}, {arm} against {base}",
        "value": statistics.mean(with_it),
        "unit": "",
        "n": len(with_it),
        "stdev": statistics.stdev(with_it),
        "peer": base,
        "peer_value": statistics.mean(without),
        "difference": found.by,
        "interval": found.half,
        "note": f"difference {found.by:+.3f}, 95 % interval +-{found.half:.3f} (Welch)",
    }


def main() -> None:
    """Writes and prints one row per arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("figure")
    parser.add_argument("base")
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--device", default="cpu", help="what the recipe ran on")
    given = parser.parse_args()
    rows = [row(given.folder, given.figure, given.base, arm) for arm in given.arms]
    print(table(rows))
    print(*(f"{made['figure']}: {made['note']}" for made in rows), sep="\n")
    append("effect", rows, given.device)


if __name__ == "__main__":
    main()
