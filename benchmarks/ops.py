"""The kernel table: every op of hone and its peer in one run on one GPU, each row also as a fraction of a measured ceiling.

python -m benchmarks.ops                    # the whole table; one H200, about ten minutes
python -m benchmarks.ops attention paged    # some areas
python -m benchmarks.ops --no-ledger        # print only
"""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from typing import Any

import torch

from benchmarks import ledger
from benchmarks.kernels.timing import ceilings

AREAS = ("attention", "sparse", "paged", "gemm", "fused", "scan")
"""Modules of benchmarks.kernels; each has `rows(ceilings) -> list of ledger rows`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", choices=[[], *AREAS], default=[], help="default: all")
    parser.add_argument("--no-ledger", action="store_true", help="print without writing the ledger")
    chosen = parser.parse_args()
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
    for area in chosen.areas or AREAS:
        begin = time.monotonic()
        try:
            made = importlib.import_module(f"benchmarks.kernels.{area}").rows(limits)
        except Exception:  # one area's failure must not lose the others' figures
            traceback.print_exc()
            print(f"-- {area} FAILED", flush=True)
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


if __name__ == "__main__":
    main()
