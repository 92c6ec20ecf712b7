"""Predicted beside measured steps of a training on two GPUs, after a fresh calibration; some four minutes on two H100.

    python -m benchmarks.train_estimates                     # calibrates, then times all of RUNS
    python -m benchmarks.train_estimates --runs fp8 --ledger # or some of them, with rows in the ledger

Each run prints a table: tokens/s, predicted tokens/s, measured over predicted rate (so predicted over measured time), memory of both, and the share of the
communication beside computation in steps between others.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

RUNS: dict[str, list[str]] = {
    "large": ["--layers=16", "--compile", "--layouts", "zero2", "zero3"],
    "fp8": ["--layers=16", "--compile", "--precision=fp8", "--layouts", "zero2"],
    "small": ["--layers=8", "--compile", "--layouts", "ddp", "zero1", "cp-ring"],
    "tensor": ["--layers=16", "--compile", "--layouts", "tp", "tp-async"],
    "experts": [
        "--shape=deepseek-v3-16b",
        "--layers=9",
        "--batch=4",
        "--seq-len=4096",
        "--layouts",
        "zero2-ep",
        "zero2-ep-peer",
    ],
    "pipeline": ["--layers=8", "--batch=2", "--seq-len=4096", "--micro-batches=4", "--layouts", "pp-1f1b", "pp-zb_v"],
}
"""Options of benchmarks.train_layouts by name: what fits 80 GiB a GPU."""


def main() -> None:
    """Runs each in turn; one that fails does not cost the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--no-calibrate", action="store_true", help="with the rates that are stored")
    parser.add_argument("--run-seconds", type=float, default=240.0, help="a run that takes longer is ended")
    parser.add_argument("--ledger", action="store_true", help="adds the rows to the ledger")
    given = parser.parse_args()
    begun = time.perf_counter()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = [] if given.no_calibrate else [("calibrate", [*torchrun, "-m", "hone", "calibrate", "--device=cuda"])]
    for name in given.runs:
        options = [*RUNS[name], "--ranks=2", "--trace", "--steps=4", *([] if given.ledger else ["--no-ledger"])]
        commands.append((name, [sys.executable, "-m", "benchmarks.train_layouts", *options]))
    for name, command in commands:
        print(f"== {name}: {' '.join(command[2:])}", flush=True)
        code = _ended(command, given.run_seconds)
        said = "done" if not code else f"FAILED, exit {code}"
        print(f"== {name}: {said}, {time.perf_counter() - begun:.0f} s so far", flush=True)


def _ended(command: list[str], seconds: float) -> int:
    """The exit status of `command`; where it takes longer it is asked to end, and ends its ranks before."""
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
