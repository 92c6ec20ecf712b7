"""The kernel table: every op of hone and its peer in one run on one GPU, each row also as a fraction of a measured ceiling.

python -m benchmarks.ops                    # the whole table; one H200, about ten minutes
python -m benchmarks.ops attention paged    # some areas
python -m benchmarks.ops --no-ledger        # print only
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import ledger

AREAS = ("attention", "latent", "sparse", "paged", "linear", "loss", "moe", "pointwise", "sample", "scan")
"""Modules of benchmarks.kernels; each has `rows(ceilings) -> list of ledger rows`."""


PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
BEGIN, END = (
    "<!-- table: written by `python -m benchmarks.ops --page` from benchmarks/ledger/ops.jsonl -->\n",
    "<!-- end -->",
)


def newest() -> list[dict[str, Any]]:
    """The newest row of every figure in the ledger, in the order of the figures' first rows."""
    path = ledger.FOLDER / "ops.jsonl"
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf8").splitlines() if path.exists() else []:
        row = json.loads(line)
        rows[row["figure"]] = row
    return list(rows.values())


def page(rows: list[dict[str, Any]]) -> str:
    """The table of docs/ops.md; the target is added to a ratio or fraction that misses it."""
    lines = ["| figure | hone | peer | ratio | of limit |", "|---|---|---|---|---|"]
    for row in rows:
        peer = f"{row['peer']}: {row['peer_value']:.4g}" if row.get("peer") else ""
        ratio = f"{row['ratio']:.2f} x" if row.get("ratio") else ""
        if row.get("ratio", 9.0) < row.get("target", 0):
            ratio += f" (target {row['target']:.2f})"
        limit = f"{row['of_limit']:.0%}" if row.get("of_limit") else ""
        if row.get("of_limit", 9.0) < row.get("of_target", 0):
            limit += f" (target {row['of_target']:.0%})"
        lines.append(f"| {row['figure']} | {row['value']:.4g} {row['unit']} | {peer} | {ratio} | {limit} |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Puts the newest figures between the marks of docs/ops.md."""
    ledger.put_between(PAGE, BEGIN, END, page(newest()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", help=f"of {', '.join(AREAS)}; default: all")
    parser.add_argument("--no-ledger", action="store_true", help="print without writing the ledger")
    parser.add_argument("--page", action="store_true", help="write docs/ops.md from the ledger, measure nothing")
    chosen = parser.parse_args()
    for area in set(chosen.areas) - set(AREAS):
        parser.error(f"no area {area!r}: there are {', '.join(AREAS)}")
    if chosen.page:
        write_page()
        return
    import torch

    from benchmarks.kernels.timing import ceilings

    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device\nfix: run this on a GPU; the ops' references need none")
    torch.manual_seed(0)
    limits = ceilings()
    print(
        f"copy {limits.copy / 1e12:.2f} TB/s, read {limits.read / 1e12:.2f} TB/s, GEMM {limits.gemm / 1e12:.0f} TFLOP/s"
    )
    rows: list[dict[str, Any]] = [
        {"figure": "ceiling copy", "value": limits.copy / 1e12, "unit": "TB/s"},
        {"figure": "ceiling read", "value": limits.read / 1e12, "unit": "TB/s"},
        {"figure": "ceiling bf16 GEMM 8192", "value": limits.gemm / 1e12, "unit": "TFLOP/s"},
    ]
    failed = []
    for area in chosen.areas or AREAS:
        begin = time.monotonic()
        try:
            made = importlib.import_module(f"benchmarks.kernels.{area}").rows(limits)
        except Exception:  # one area's failure must not lose the others' figures
            traceback.print_exc()
            failed.append(area)
            continue
        rows += made
        print(f"-- {area}, {time.monotonic() - begin:.0f} s\n{ledger.table(made)}", flush=True)
        torch.cuda.empty_cache()
    missed = [
        row
        for row in rows
        if row.get("ratio", 9) < row.get("target", 0) or row.get("of_limit", 9) < row.get("of_target", 0)
    ]
    print(f"{len(missed)} of {len(rows)} rows miss their target: " + "; ".join(row["figure"] for row in missed))
    if not chosen.no_ledger:
        ledger.append("ops", rows, device="cuda")
    if failed:
        raise SystemExit(f"error: no figures of {', '.join(failed)}: see the tracebacks above")


if __name__ == "__main__":
    main()
